"""Small, correct, slow plugins of each kind. Mutants change one piece of them."""
