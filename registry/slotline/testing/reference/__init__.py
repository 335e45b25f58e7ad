"""Small, correct, slow plugins of each kind, which mutants change one piece of."""
