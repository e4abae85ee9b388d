"""How replicas agree: the collectives of each framework, and what ranks of one host share."""
