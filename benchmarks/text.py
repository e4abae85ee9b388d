"""How fast is a column of text embedded and answered against the libraries by hand?

Small models with random weights, float32, texts of 4 to 60 words. `generate` draws 512 answers, each of whose
tokens is the last with a probability of 1/40, against `model.generate` for each batch of 32, which is what a
pandas UDF does. `embed` computes 4,096 texts against `SentenceTransformer.encode` of the list sorted by
length in the same process, and, on a frame with local[2], against predict_batch_udf.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from _bench import Report, arguments, rounds, seconds, spark_session, workplace
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kindler import Estimator
from kindler.types import Sampling

WORDS = 2000
END = 1
ANSWER = 128


def texts(rows: int) -> list[str]:
    random = np.random.default_rng(0)
    lengths = random.integers(4, 60, rows)
    return [" ".join(f"w{word}" for word in random.integers(2, WORDS, length)) for length in lengths]


def tokenizer() -> Any:
    vocabulary = {"[PAD]": 0, "[END]": END, **{f"w{i}": i for i in range(2, WORDS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[END]")


def decoder() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=256, **sizes, **ends))
    model.lm_head = torch.nn.Linear(256, WORDS)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
        model.lm_head.bias.zero_()
        model.lm_head.bias[END] = float(np.log(WORDS / 40))
    return model.eval()


def encoder(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as parts

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    BertModel(BertConfig(vocab_size=WORDS, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return SentenceTransformer(
        modules=[parts.Transformer(folder), parts.Pooling(256), parts.Normalize()], device="cpu"
    )


def one_batch_after_another(model: Any, words: Any, prompts: list[str]) -> list[str]:
    words.padding_side = "left"
    answers: list[str] = []
    for first in range(0, len(prompts), 32):
        given = words(prompts[first : first + 32], padding=True, return_tensors="pt")
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=ANSWER, do_sample=True, top_k=0)
        answers += words.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def their_udf(model: Any) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import types as T

    def made() -> Any:
        torch.set_num_threads(1)
        return lambda values: model.encode(list(values), batch_size=len(values))

    return predict_batch_udf(made, return_type=T.ArrayType(T.FloatType()), batch_size=64)


def main() -> None:
    given = arguments(__doc__, repeats=3)
    prompts, rows = texts(64 if given.quick else 512), texts(128 if given.quick else 4096)
    report = Report("text", "rows/s of texts of 4 to 60 words on 2 cores", quick=given.quick)
    with workplace(), tempfile.TemporaryDirectory() as folder:
        spark, model, words = spark_session(2), decoder(), tokenizer()
        writer = Estimator.from_huggingface(model, words, task="text-generation", device="cpu")
        theirs = encoder(folder)
        embedder = Estimator.from_huggingface(theirs, task="embedding", device="cpu")
        udf, frame = their_udf(theirs), spark.createDataFrame([(text,) for text in rows], "text string")
        frame = frame.repartition(2).cache()
        frame.count()

        def generated() -> None:
            sampling = Sampling(max_new_tokens=ANSWER, temperature=1.0)
            writer.generate({"prompt": prompts}, sampling=sampling, verbose=0)

        def drained(scored: Any) -> None:
            scored.select("embedding").write.format("noop").mode("overwrite").save()

        ways = {
            "generate per batch": lambda: seconds(lambda: one_batch_after_another(model, words, prompts)),
            "generate": lambda: seconds(generated),
            "encode": lambda: seconds(lambda: theirs.encode(sorted(rows, key=len), batch_size=64)),
            "embed": lambda: seconds(lambda: embedder.embed({"text": rows}, verbose=0)),
            "predict_batch_udf": lambda: seconds(lambda: drained(frame.withColumn("embedding", udf("text")))),
            "embed, frame": lambda: seconds(lambda: drained(embedder.embed(frame))),
        }
        spent = rounds(ways, repeats=given.repeats, warm_up=not given.quick)
    counts = {name: len(prompts) if name.startswith("generate") else len(rows) for name in ways}
    speed = {name: [counts[name] / s for s in values] for name, values in spent.items()}
    for name, values in speed.items():
        report.figure(name, values, "rows/s")
    report.ratio("generate / per batch", speed["generate"], speed["generate per batch"], at_least=3.0)
    report.ratio("embed / encode", speed["embed"], speed["encode"], at_least=1.0)
    udf_alone = speed["predict_batch_udf"]
    report.ratio("embed / predict_batch_udf", speed["embed, frame"], udf_alone, at_least=2.0)
    report.finish()


if __name__ == "__main__":
    main()
