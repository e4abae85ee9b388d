"""How replicas agree: the collectives of each framework, and what the ranks of a host share."""
