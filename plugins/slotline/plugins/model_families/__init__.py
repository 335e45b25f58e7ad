"""Model families: how a checkpoint becomes a model that calls attention through slots."""
