"""What a stored estimator of scikit-learn computes with, by its file. Loads nothing.

A type is harmless if a file that lies about its fields gets wrong numbers, and no more. Those here compute
with numpy, which looks at every shape. What is compiled for one estimator (trees, neighbours, support
vectors, clusters) or makes sparse matrices of numbers from the file (one-hot codes, words) follows what the
file says without looking, and reads or writes wherever that leads.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Beside what skops knows by itself: plain Python with numbers in it, and pure functions.
HARMLESS = frozenset(
    {
        "numpy.dtype",
        "numpy.mean",
        "sklearn._loss.loss.HalfTweedieLossIdentity",
        "sklearn.calibration._CalibratedClassifier",
        "sklearn.calibration._SigmoidCalibration",
        "sklearn.feature_selection._univariate_selection.f_classif",
        "sklearn.feature_selection._univariate_selection.f_regression",
        "sklearn.gaussian_process._gpc._BinaryGaussianProcessClassifierLaplace",
        "sklearn.gaussian_process.kernels.ConstantKernel",
        "sklearn.gaussian_process.kernels.Product",
        "sklearn.gaussian_process.kernels.RBF",
        "sklearn.gaussian_process.kernels.Sum",
        "sklearn.gaussian_process.kernels.WhiteKernel",
        "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
        "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    }
)
# fmt: off
_WITH_NUMPY = frozenset((
    "ARDRegression", "AdaBoostClassifier", "AdaBoostRegressor", "BaggingClassifier", "BaggingRegressor",
    "BayesianGaussianMixture", "BayesianRidge", "BernoulliNB", "Binarizer", "CCA",
    "CalibratedClassifierCV", "CategoricalNB", "ClassifierChain", "ColumnTransformer", "ComplementNB",
    "DummyClassifier", "DummyRegressor", "ElasticNet", "ElasticNetCV", "EmpiricalCovariance",
    "FactorAnalysis", "FastICA", "FeatureUnion", "FixedThresholdClassifier", "FrozenEstimator",
    "FunctionTransformer", "GammaRegressor", "GaussianMixture", "GaussianNB",
    "GaussianProcessClassifier", "GaussianProcessRegressor", "GaussianRandomProjection",
    "GenericUnivariateSelect", "GridSearchCV", "HuberRegressor", "IncrementalPCA", "IsotonicRegression",
    "LabelBinarizer", "LabelEncoder", "Lars", "LarsCV", "Lasso", "LassoCV", "LassoLars", "LassoLarsCV",
    "LassoLarsIC", "LedoitWolf", "LinearDiscriminantAnalysis", "LinearRegression", "LinearSVC",
    "LinearSVR", "LogisticRegression", "LogisticRegressionCV", "MLPClassifier", "MLPRegressor",
    "MaxAbsScaler", "MinMaxScaler", "MissingIndicator", "MultiOutputClassifier", "MultiOutputRegressor",
    "MultiTaskElasticNet", "MultiTaskElasticNetCV", "MultiTaskLasso", "MultiTaskLassoCV",
    "MultinomialNB", "Normalizer", "OAS", "OneVsOneClassifier", "OneVsRestClassifier", "OrdinalEncoder",
    "OrthogonalMatchingPursuit", "OrthogonalMatchingPursuitCV", "PCA", "PLSCanonical", "PLSRegression",
    "PLSSVD", "PassiveAggressiveClassifier", "PassiveAggressiveRegressor", "Perceptron", "Pipeline",
    "PoissonRegressor", "PolynomialFeatures", "PowerTransformer", "QuadraticDiscriminantAnalysis",
    "QuantileRegressor", "QuantileTransformer", "RANSACRegressor", "RBFSampler", "RFE", "RFECV",
    "RandomizedSearchCV", "RegressorChain", "Ridge", "RidgeCV", "RidgeClassifier", "RidgeClassifierCV",
    "RobustScaler", "SGDClassifier", "SGDOneClassSVM", "SGDRegressor", "SelectFdr", "SelectFpr",
    "SelectFromModel", "SelectFwe", "SelectKBest", "SelectPercentile", "SelfTrainingClassifier",
    "SequentialFeatureSelector", "ShrunkCovariance", "SimpleImputer", "StackingClassifier",
    "StackingRegressor", "StandardScaler", "TargetEncoder", "TfidfTransformer", "TheilSenRegressor",
    "TransformedTargetRegressor", "TruncatedSVD", "TweedieRegressor", "VarianceThreshold",
    "VotingClassifier", "VotingRegressor",
))
# fmt: on
# Losses, which only training computes.
_LOSSES = ("sklearn._loss.", "sklearn.linear_model._sgd_fast.")
_VALUES = frozenset(
    f"{name}Node"
    for name in (
        *("Json", "List", "Tuple", "Set", "Dict", "DefaultDict", "Slice", "Cached", "Bytes", "Bytearray"),
        *("NdArray", "DType", "Type", "Function"),
    )
)
_STATE_LENGTH = 624  # of numpy's Mersenne Twister, which does not look at where its state says it is


def compiled(path: Path) -> list[str]:
    """The types in a file of skops whose compiled code would believe what the file says."""
    with zipfile.ZipFile(path) as archive:
        schema = json.loads(archive.read("schema.json"))
    return sorted({name for node in _nodes(schema) if not _is_harmless(node, name := _name(node))})


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if "__loader__" in value or "__class__" in value:
                yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _name(node: dict[str, Any]) -> str:
    return f"{node.get('__module__')}.{node.get('__class__')}"


def _is_harmless(node: dict[str, Any], name: str) -> bool:
    if node.get("__loader__") == "RandomStateNode":
        return _is_random_state(node)
    if not name.startswith("sklearn."):
        return node.get("__loader__") in _VALUES
    return name in HARMLESS or name.rpartition(".")[2] in _WITH_NUMPY or name.startswith(_LOSSES)


def _is_random_state(node: dict[str, Any]) -> bool:
    try:
        state = node["content"]["content"]
        where = json.loads(state["state"]["content"]["pos"]["content"])
        kind = json.loads(state["bit_generator"]["content"])
        return kind == "MT19937" and type(where) is int and 0 <= where <= _STATE_LENGTH
    except (KeyError, TypeError, ValueError):
        return False
