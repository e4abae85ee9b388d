"""Gangs of supervised worker processes: who starts them, watches them and ends them."""
