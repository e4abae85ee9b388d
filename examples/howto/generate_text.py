"""Generate a text column of a Spark DataFrame: dates as people write them, in the form of databases.

    python examples/howto/generate_text.py
    python examples/howto/generate_text.py --model Qwen/Qwen2.5-0.5B-Instruct

Without `--model`, a small model is created here and learns the task first, from rows with a question and an
answer.
"""

import argparse
from datetime import date, timedelta

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kindler
from kindler import Estimator
from kindler.types import Sampling

FORMS = ("%d %B %Y", "%B %d, %Y", "%d.%m.%Y", "%d %b %Y")


def dates(rows, seed):
    random = np.random.default_rng(seed)
    days = [date(1990, 1, 1) + timedelta(days=int(day)) for day in random.integers(0, 16000, rows)]
    forms = random.choice(FORMS, rows)
    return [(f"{day.strftime(form)} =", day.isoformat()) for day, form in zip(days, forms, strict=True)]


def small_model(texts):
    """Digits and words are its tokens."""
    pieces = pre_tokenizers.Split(Regex(r"\d|[A-Za-z]+|\s|[^\w\s]"), "isolated")
    found = sorted({piece for text in texts for piece, _ in pieces.pre_tokenize_str(text)})
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["[END]", *found])}, unk_token="[END]")
    )
    words.pre_tokenizer, words.decoder = pieces, decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]", pad_token="[END]")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0, **sizes)
    return tokenizer, LlamaForCausalLM(config)


def main(name, rows, epochs):
    spark = kindler.init(cores=2)
    frame = spark.createDataFrame(dates(200, seed=1), "prompt string, right string").repartition(4)
    if name:
        estimator = Estimator.from_huggingface(name, task="text-generation")
    else:
        train = dates(rows, seed=0)
        tokenizer, model = small_model([text for pair in train for text in pair])
        estimator = Estimator.from_huggingface(
            model,
            tokenizer,
            task="text-generation",
            optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
            workers=2,
        )
        learned = spark.createDataFrame(train, "question string, answer string")
        columns = ["question", "answer"]  # the answers are learned, the questions are not
        estimator.fit(learned, epochs=epochs, batch_size=64, feature_cols=columns, verbose=0)

    answered = estimator.generate(
        frame, "prompt", "answer", sampling=Sampling(max_new_tokens=12), details=True
    )  # lazy, as predict
    answered = answered.cache()
    answered.select("prompt", "answer", "answer_reason").show(4, truncate=False)
    right = answered.where("answer = right").count() / answered.count()
    print(f"{right:.0%} of the answers are right")
    kindler.stop()
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model of the Hugging Face hub, or a folder that has one")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    main(options.model, options.rows, options.epochs)
