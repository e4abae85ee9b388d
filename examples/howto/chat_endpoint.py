"""A chat endpoint: store a text model, serve it, and stream its answers with OpenAI's own client.

    python examples/howto/chat_endpoint.py
    python examples/howto/chat_endpoint.py --model Qwen/Qwen2.5-0.5B-Instruct

Without `--model`, a small model is created here and learns a few questions first.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import openai
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kindler import Estimator, Store

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
}
TEMPLATE = "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}assistant :"


def learned():
    """A model that has learned to say capitals; words are its tokens."""
    rows = {
        "question": [f"user : capital of {country} ? assistant :" for country in CAPITALS],
        "answer": [f"the capital of {country} is {capital} ." for country, capital in CAPITALS.items()],
    }
    found = sorted({word for texts in rows.values() for text in texts for word in text.split()})
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["[END]", *found])}, unk_token="[END]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]", pad_token="[END]")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0, **sizes)
    )
    estimator = Estimator.from_huggingface(
        model,
        tokenizer,
        task="text-generation",
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        workers=1,
    )
    often = {name: texts * 60 for name, texts in rows.items()}
    estimator.fit(often, epochs=1, batch_size=6, feature_cols=["question", "answer"], verbose=0)
    return estimator


def main(name):
    estimator = Estimator.from_huggingface(name, task="text-generation") if name else learned()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        store.models.put(estimator, "capitals", tag="prod")
        store.close()
        command = [sys.executable, "-m", "kindler", "serve", "--store", f"{folder}/store", "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        try:
            url = server.stdout.readline().split()[-1]
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")  # or a key of `kindler keys add`
            stream = client.chat.completions.create(
                model="capitals@prod",
                messages=[{"role": "user", "content": "capital of Japan ?"}],
                max_tokens=20,
                temperature=0,
                stream=True,
            )
            answer = ""
            for chunk in stream:
                answer += chunk.choices[0].delta.content or ""
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            print()
            whole = client.chat.completions.create(
                model="capitals@prod",
                messages=[{"role": "user", "content": "capital of Peru ?"}],
                temperature=0,
            )
            print(whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.total_tokens)
            return answer
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model of the Hugging Face hub, or a folder that has one")
    main(parser.parse_args().model)
