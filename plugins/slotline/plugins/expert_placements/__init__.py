"""Expert placements: which rank has which experts of a mixture."""
