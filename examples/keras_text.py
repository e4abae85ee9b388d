"""A Keras model that takes text: a column of strings, with the word lookup inside the model.

python examples/keras_text.py
"""

import keras
import numpy as np
import pandas as pd

from kindler import Estimator

GOOD, BAD = ["superb", "moving", "funny", "fresh"], ["dull", "slow", "flat", "stale"]
OTHER = ["a", "film", "about", "two", "friends", "and", "the", "sea"]


def reviews(rows, seed=0):
    """Sentences with a good or a bad word somewhere in them."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, rows)
    texts = []
    for label in labels:
        words = list(random.choice(OTHER, random.integers(4, 12)))
        words.insert(random.integers(len(words)), random.choice(GOOD if label else BAD))
        texts.append(" ".join(words))
    return pd.DataFrame({"text": texts, "label": labels})


def classifier(config):
    words = keras.layers.TextVectorization(output_mode="multi_hot", vocabulary=config["words"])
    model = keras.Sequential(
        [keras.Input((), dtype="string"), words, keras.layers.Dense(2, activation="softmax")]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.05),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main():
    train, test = reviews(600), reviews(200, seed=1)
    estimator = Estimator.from_keras(
        model=classifier,
        config={"words": sorted({word for text in train["text"] for word in text.split()})},
        keras_backend="tensorflow",
        workers=2,
    )
    estimator.fit(train, epochs=5, batch_size=50, feature_cols="text", label_cols="label", verbose=0)
    print(f"test accuracy: {estimator.evaluate(test, verbose=0)['accuracy']:.4f}")
    scored = estimator.predict(pd.DataFrame({"text": ["a superb film", "a dull film"]}), verbose=0)
    print("predicted:", [int(np.argmax(row)) for row in scored["prediction"]])


if __name__ == "__main__":
    main()
