"""MLflow: runs of `fit` logged to a tracking server, and stored models as MLflow models.

    logger.py      `MLflowLogger`, which follows a run of `fit`
    run.py         one run of MLflow
    journal.py     what is said of it, written by a thread of its own
    models.py      a stored model as the folder of an MLflow model
    signature.py   what a model takes and gives, in MLflow's words
    loader.py      what MLflow calls to load such a folder

Parts that need mlflow load with the first use of it.
"""
