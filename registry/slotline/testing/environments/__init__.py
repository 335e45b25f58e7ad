"""What the core does around a plugin, simulated for the checks, and made so that wrong reads and writes show."""
