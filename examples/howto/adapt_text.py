"""Adapt a text model with LoRA: two small adapters over one base, in a store that has the base once.

    python examples/howto/adapt_text.py

The base is a small model made here that knows what "great" and "awful" mean. Reviews of phones and soups use
other words, and some words of both mean the opposite: "hot", "light".
"""

import tempfile
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from kindler import Estimator, Store
from kindler.types import Lora

WORDS = {  # what praises and what does not
    "films": (["great", "lovely"], ["awful", "dull"]),
    "phones": (["great", "light", "quick"], ["awful", "hot", "thick"]),
    "soups": (["great", "hot", "thick"], ["awful", "light", "quick"]),
}
OTHERS = ["it", "was", "a", "very", "and", "the", "one", "we", "had", "so"]


def reviews(topic, rows, seed):
    random = np.random.default_rng(seed)
    label = random.integers(0, 2, rows)
    texts = [[*random.choice(OTHERS, 6), random.choice(WORDS[topic][0 if good else 1])] for good in label]
    return pa.table({"text": [" ".join(random.permutation(words)) for words in texts], "label": label})


def small_model(folder):
    found = sorted({word for both in WORDS.values() for some in both for word in some})
    words = ["[PAD]", "[UNK]", *OTHERS, *found]
    vocabulary = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    vocabulary.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    names = {0: "bad", 1: "good"}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=16, id2label=names, **sizes)
    estimator = estimator_of(BertForSequenceClassification(config), tokenizer)
    fit(estimator, "films", epochs=3)
    estimator.get_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def estimator_of(model, tokenizer, **options):
    options = {"optimizer": partial(torch.optim.AdamW, lr=3e-3), "workers": 2, **options}
    return Estimator.from_huggingface(model, tokenizer, task="text-classification", **options)


def fit(estimator, topic, epochs):
    rows = reviews(topic, 600, seed=0)
    estimator.fit(rows, epochs=epochs, batch_size=40, feature_cols="text", label_cols="label", verbose=0)


def accuracy(estimator, topic):
    rows = reviews(topic, 200, seed=1)
    found = estimator.predict(rows.drop(["label"]), verbose=0)["label"].to_numpy()
    return np.mean((found == "good") == rows["label"].to_numpy())


def main():
    with tempfile.TemporaryDirectory() as folder, Store(f"{folder}/store") as store:
        small_model(f"{folder}/base")
        base = Estimator.from_huggingface(f"{folder}/base", task="text-classification", workers=1)
        before = {topic: accuracy(base, topic) for topic in ("phones", "soups")}
        version = store.models.put(base.get_model(), "reviews")
        for topic in before:
            model = store.models.get("reviews")  # or the folder, or a name on the hub
            # The base has never seen some of these words: their embeddings are trained as a whole.
            adapter = Lora(rank=8, target_modules="all-linear", modules_to_save=["word_embeddings"])
            tuned = estimator_of(model, f"{folder}/base", adapter=adapter)
            fit(tuned, topic, epochs=4)
            stored = store.models.put(tuned, f"reviews-{topic}")
            own = sum(file.size for file in stored.files if file.path == "model/adapters.safetensors")
            known = stored.meta["model_meta"]["base"]
            print(f"{topic}: {before[topic]:.0%} right before, {accuracy(tuned, topic):.0%} with adapters")
            print(f"{stored} over {known['version']}: {own:,} bytes beside {version.size:,}")

        phones = store.models.get("reviews-phones", trusted=True)
        plain = phones.merge().get_model()  # for programs that know nothing of adapters
        plain.save_pretrained(f"{folder}/phones")
        print(f"merged: {type(plain).__name__}")
        return accuracy(phones, "phones")


if __name__ == "__main__":
    main()
