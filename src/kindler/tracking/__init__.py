"""MLflow: runs of `fit` logged to a tracking server, and stored models as MLflow models.

Parts that need mlflow load with the first use of it.
"""
