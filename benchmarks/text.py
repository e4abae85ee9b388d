"""How fast is a column of text embedded and answered against the libraries by hand?

Small models with random weights, float32, texts of 4 to 60 words. `generate` draws 512 answers, each of whose
tokens is the last with a probability of 1/40, against `model.generate` for each batch of 32, which is what a
pandas UDF does. `embed` computes 4,096 texts against `SentenceTransformer.encode` of the list sorted by
length in the same process, and, on a frame with local[2], against predict_batch_udf.

With `--gpu`, a Llama of 1.2 billion parameters and a BERT of 0.33, in bfloat16 with random weights on one
GPU: `generate` draws answers of up to 256 tokens to 4,096 prompts against the continuous batching of
transformers, `generate_batch`, and against `model.generate` of padded batches of 256 prompts (1,024 of them);
`embed` computes 40,000 texts against `encode`. Tokenising counts everywhere. What fails is printed, and the
rest is measured.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch
from _bench import Report, arguments, rounds, seconds, spark_session, workplace
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kindler import Estimator
from kindler.types import Sampling

WORDS = 2000
END = 1
ANSWER = 128


def texts(rows: int) -> list[str]:
    random = np.random.default_rng(0)
    lengths = random.integers(4, 60, rows)
    return [" ".join(f"w{word}" for word in random.integers(2, WORDS, length)) for length in lengths]


def tokenizer(size: int = WORDS) -> Any:
    vocabulary = {"[PAD]": 0, "[END]": END, **{f"w{i}": i for i in range(2, size)}}
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


def encoder(
    folder: str, width: int = 256, layers: int = 4, heads: int = 4, inner: int = 1024, words: Any = None
) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as parts

    torch.manual_seed(0)
    words = words or tokenizer()
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    BertModel(BertConfig(vocab_size=len(words), intermediate_size=inner, **sizes)).save_pretrained(folder)
    words.save_pretrained(folder)
    return SentenceTransformer(
        modules=[parts.Transformer(folder), parts.Pooling(width), parts.Normalize()], device="cpu"
    )


def one_batch_after_another(
    model: Any, words: Any, prompts: list[str], size: int = 32, answer: int = ANSWER
) -> list[str]:
    words.padding_side = "left"
    answers: list[str] = []
    for first in range(0, len(prompts), size):
        given = words(prompts[first : first + size], padding=True, return_tensors="pt")
        inputs = {name: given[name].to(model.device) for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=answer, do_sample=True, top_k=0)
        answers += words.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def their_udf(model: Any) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import types as T

    def made() -> Any:
        torch.set_num_threads(1)
        return lambda values: model.encode(list(values), batch_size=len(values))

    return predict_batch_udf(made, return_type=T.ArrayType(T.FloatType()), batch_size=64)


class OnGpu:
    """Both models, and the ways to run them that are compared."""

    def __init__(self, folder: str, *, quick: bool) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.rows, self.padded, self.texts, self.answer = (
            (64, 32, 256, 16) if quick else (4096, 1024, 40_000, 256)
        )
        self.small, self.folder = quick, folder
        self.words = tokenizer(WORDS if quick else 128_256)
        self.prompts = texts(self.rows)

    def decoder(self) -> Any:
        size, layers = (64, 2) if self.small else (2048, 16)
        vocabulary = len(self.words)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=size,
            intermediate_size=4 * size,
            num_hidden_layers=layers,
            num_attention_heads=size // (16 if self.small else 64),
            num_key_value_heads=size // (64 if self.small else 256),
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM(config)
            model.lm_head = torch.nn.Linear(size, vocabulary)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.1)
            model.lm_head.bias.zero_()
            model.lm_head.bias[END] = float(np.log(vocabulary / (self.answer * 0.4)))
        return model.to(torch.bfloat16).eval()

    def generating(self) -> dict[str, Callable[[], float]]:
        """Rows/s of each way."""
        model = self.decoder()
        writer = Estimator.from_huggingface(
            model.to("cpu"), self.words, task="text-generation", device=self.device, workers=1
        )
        model.to(self.device)
        sampling = Sampling(max_new_tokens=self.answer, temperature=1.0)
        writer.generate({"prompt": self.prompts[:8]}, sampling=sampling, verbose=0)  # loads the model

        def ours() -> float:
            return self.rows / seconds(
                lambda: writer.generate(
                    {"prompt": self.prompts}, sampling=sampling, batch_size=256, verbose=0
                )
            )

        def continuous() -> float:
            rules = GenerationConfig(
                max_new_tokens=self.answer,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                eos_token_id=END,
                pad_token_id=0,
            )

            def answered() -> None:
                inputs = self.words(self.prompts)["input_ids"]
                results = model.generate_batch(inputs=inputs, generation_config=rules)
                answers = [made.generated_tokens for made in results.values()]
                self.words.batch_decode(answers, skip_special_tokens=True)
                if len(answers) != self.rows:
                    raise RuntimeError(f"{len(answers)} of {self.rows} answers")

            return self.rows / seconds(answered)

        def padded() -> float:
            asked = sorted(self.prompts, key=len)[:: self.rows // self.padded]
            return len(asked) / seconds(
                lambda: one_batch_after_another(model, self.words, asked, size=256, answer=self.answer)
            )

        return {"generate": ours, "generate_batch": continuous, "model.generate of batches": padded}

    def steps(self) -> dict[str, Callable[[], float]]:
        """Milliseconds of a pass of the engine alone, 256 rows of 100 and 300 columns."""
        from kindler.frameworks.torch.prompts import Prompt
        from kindler.frameworks.torch.slots import Slots

        model = self.decoder()
        rows = 16 if self.small else 256

        def stepping(width: int) -> float:
            engine = Slots.of(model, nullcontext)
            assert engine is not None
            sampling = Sampling(max_new_tokens=200, temperature=1.0)
            tokens = [[2 + number] * width for number in range(rows)]
            engine.join([Prompt.of(i, some, sampling, context=None) for i, some in enumerate(tokens)])
            engine._ends = set()
            for _ in range(3):
                engine.step()
            spent = seconds(lambda: [engine.step() for _ in range(20)])
            return spent / 20 * 1000

        def joining() -> float:
            engine = Slots.of(model, nullcontext)
            assert engine is not None

            def join() -> None:
                sampling = Sampling(max_new_tokens=200)
                some = [Prompt.of(i, [2] * 40, sampling, context=None) for i in range(rows // 8)]
                engine.join(some)
                engine.step()
                for prompt in some:
                    prompt.stopped = True
                engine.step()

            for _ in range(3):
                join()
            return seconds(lambda: [join() for _ in range(5)]) / 5 * 1000

        return {
            "a step at 100 columns": lambda: stepping(100),
            "a step at 300 columns": lambda: stepping(300),
            "32 prompts of 40 tokens joining, and two steps": joining,
        }

    def embedding(self) -> dict[str, Callable[[], float]]:
        rows = texts(self.texts)
        sizes = (64, 2, 4, 128) if self.small else (1024, 24, 16, 4096)
        theirs = encoder(self.folder, *sizes, words=self.words).to(self.device, torch.bfloat16)
        embedder = Estimator.from_huggingface(theirs, task="embedding", device=self.device, workers=1)
        embedder.embed({"text": rows[:256]}, batch_size=256, verbose=0)

        def encode() -> None:
            theirs.encode(sorted(rows, key=len), batch_size=256)

        def embed() -> None:
            embedder.embed({"text": rows}, batch_size=256, verbose=0)

        return {
            "embed": lambda: self.texts / seconds(embed),
            "encode": lambda: self.texts / seconds(encode),
        }


def on_gpu(report: Report, *, repeats: int, quick: bool) -> None:
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = OnGpu(folder, quick=quick)
        for part, unit in ((models.steps, "ms"), (models.generating, "rows/s"), (models.embedding, "rows/s")):
            try:
                ways = part()
            except Exception:  # noqa: BLE001
                traceback.print_exc()
                continue
            for number in range(repeats):
                for name, way in ways.items():
                    if number and (unit == "ms" or name == "model.generate of batches"):
                        continue
                    try:
                        found.setdefault(name, []).append(way())
                        print(f"  {name}: {found[name][-1]:.1f} {unit}", flush=True)
                    except Exception:  # noqa: BLE001
                        traceback.print_exc()
            for name in ways:
                if name in found:
                    report.figure(name, found[name], unit)
            del ways
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    limits = (("generate", "generate_batch", 0.9), ("generate", "model.generate of batches", 0.9))
    for ours, theirs, least in (*limits, ("embed", "encode", 0.95)):
        if ours in found and theirs in found:
            report.ratio(f"{ours} / {theirs}", [median(found[ours])], [median(found[theirs])], at_least=least)
    report.finish()


def main() -> None:
    given = arguments(__doc__, repeats=3, gpu="measure larger models on a GPU instead")
    if given.gpu:
        report = Report("text_gpu", "rows/s of texts of 4 to 60 words on one GPU", quick=given.quick)
        on_gpu(report, repeats=given.repeats, quick=given.quick)
        return
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
