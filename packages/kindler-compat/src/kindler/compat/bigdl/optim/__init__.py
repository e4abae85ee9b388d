"""BigDL's optimizers, schedules, triggers, summaries and validation methods."""
