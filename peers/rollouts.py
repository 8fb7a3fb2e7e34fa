"""Let another host generate for reinforcement learning, with the model that a follower publishes there::

    p2pdiloco join INVITE --follow --publish DIR --publish-s 10 --format hf     # --like and --model for LoRA
    python peers/rollouts.py DIR [HOST:PORT]

In the script that trains, with this file beside it: ``GRPOTrainer(..., rollout_func=rollouts("http://HOST:PORT"))``.
The completions are by a version that is some seconds old; GRPO treats it as the newest one. Anyone who reaches the port
can use the model: name an address of a network of yours. Needs the extra hf; the script that trains also needs TRL.
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_PROMPTS, MOST_TOKENS = 1 << 20, 256, 4096


def rollouts(url: str) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return a ``rollout_func`` for TRL's GRPOTrainer that asks the server at ``url``."""

    def generate(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids, _, _ = trainer._tokenize_prompts(prompts)
        asked = {"prompts": ids, "tokens": trainer.max_completion_length, "temperature": trainer.temperature}
        request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{url}: {error.read(4096).decode('utf-8', 'replace')}") from error
        trainer._metrics["train"]["rollouts/version"].append(found.pop("step"))
        return {"prompt_ids": ids, **found}

    return generate


class Generator:
    """The newest version in a folder of publications."""

    def __init__(self, folder: Path) -> None:
        self._latest = folder / "latest"
        self._name = ""
        self._model: Any = None
        self._end: int = -1

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return completions of ``asked["prompts"]``, lists of token ids, with the logarithms of their probabilities.

        Raises:
            ValueError, KeyError, TypeError, OSError: they cannot be completed.
        """
        import torch
        import transformers

        prompts, tokens, temperature = asked["prompts"], int(asked["tokens"]), float(asked["temperature"])
        if not 0 < len(prompts) <= MOST_PROMPTS or not all(prompts) or not 0 < tokens <= MOST_TOKENS:
            raise ValueError(f"send 1 to {MOST_PROMPTS} prompts, and ask for 1 to {MOST_TOKENS} tokens")
        if (name := self._latest.resolve().name) != self._name:
            folder = self._latest.parent / name
            self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
            end = self._model.generation_config.eos_token_id
            self._end = -1 if end is None else end[0] if isinstance(end, list) else end
            self._name = name
        longest = max(map(len, prompts))
        pad = [longest - len(prompt) for prompt in prompts]
        given = torch.tensor([[0] * n + prompt for n, prompt in zip(pad, prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in zip(pad, prompts, strict=True)])
        if not 0 <= int(given.min()) <= int(given.max()) < self._model.config.vocab_size:
            raise ValueError("a token is not in the model's vocabulary: use the model's tokenizer")
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "pad_token_id": max(0, self._end)}
        with torch.no_grad():
            found = self._model.generate(
                given,
                attention_mask=mask,
                max_new_tokens=tokens,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        drawn = found.sequences[:, longest:]
        chances = torch.stack(found.logits, 1).div(temperature).log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
        ended = (drawn == self._end).long().cumsum(1)
        lengths = [int((row == 0).sum()) + int(row[-1] > 0) for row in ended]
        return {
            "completion_ids": [row[:n].tolist() for row, n in zip(drawn, lengths, strict=True)],
            "logprobs": [row[:n].tolist() for row, n in zip(chances, lengths, strict=True)],
            "step": int(self._name.split("-")[1]),
        }


def server(folder: Path, host: str, port: int) -> HTTPServer:
    """Return a server that completes prompts with the newest version in ``folder``, one request at a time."""
    generator = Generator(folder)

    class Handler(BaseHTTPRequestHandler):
        timeout = 60.0

        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", 0))
                if not 0 < length <= MOST_BYTES:
                    raise ValueError(f"send 1 to {MOST_BYTES:,} bytes")
                status, told = 200, generator.answer(json.loads(self.rfile.read(length)))
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                status, told = 400, {"error": f"these prompts cannot be completed: {error!r}"}
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return HTTPServer((host, port), Handler)


def main() -> None:
    """Answer until interrupted."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    host, _, port = (sys.argv[2] if len(sys.argv) == 3 else "127.0.0.1:8100").rpartition(":")
    sys.stderr.write(f"completing prompts at http://{host}:{port} with {sys.argv[1]}/latest\n")
    server(Path(sys.argv[1]), host, int(port)).serve_forever()


if __name__ == "__main__":
    main()
