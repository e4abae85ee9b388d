"""Frameworks: how a replica of a model is built, trained, saved and used to predict, one package each."""
