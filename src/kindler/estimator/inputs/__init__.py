"""The kinds of data that an Estimator takes: one file for each, and one row in `recognise.py`."""
