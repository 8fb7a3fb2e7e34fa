"""peers/rollouts.py: completions by the newest publication, over a real socket."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.rollouts import MOST_PROMPTS, server

pytestmark = pytest.mark.heavy


def publish(folder: Path, step: int) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    torch.manual_seed(step)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=12, num_attention_heads=2, eos_token_id=1, pad_token_id=0, **sizes)
    model = transformers.LlamaForCausalLM(config)
    name = f"step-{step:08d}-00000000"
    model.save_pretrained(folder / name)
    os.symlink(name, folder / "next")
    os.replace(folder / "next", folder / "latest")
    return model.eval()


def ask(port: int, asked: object) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps(asked).encode())
    try:
        with urllib.request.urlopen(request, timeout=60.0) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@torch.no_grad()
def test_completions_are_of_the_newest_version_and_have_its_probabilities(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    with server(tmp_path, "127.0.0.1", 0) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        port = http.server_address[1]
        good = {"prompts": [[2, 3, 4], [5]] * 8, "tokens": 6, "temperature": 0.5}
        assert ask(port, good)[1]["step"] == 3
        model = publish(tmp_path, 4)
        status, told = ask(port, good)
        assert (status, told["step"]) == (200, 4)
        for prompt, drawn, chances in zip(good["prompts"], told["completion_ids"], told["logprobs"], strict=True):
            assert 0 < len(drawn) <= 6
            assert len(drawn) == 6 or drawn[-1] == 1, "it ends with the end of the text"
            assert 1 not in drawn[:-1]
            logits = model(torch.tensor([[*prompt, *drawn]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.div(0.5).log_softmax(-1)[range(len(drawn)), drawn]
            assert torch.allclose(torch.tensor(chances), expected, atol=1e-4)
        for odd in (
            [],
            {"prompts": []},
            good | {"prompts": [[]]},
            good | {"prompts": [[99]]},
            good | {"prompts": [["x"]]},
            good | {"prompts": [[2]] * (MOST_PROMPTS + 1)},
            good | {"tokens": 10**9},
            good | {"temperature": 0},
        ):
            status, told = ask(port, odd)
            assert (status, "cannot be completed" in told["error"]) == (400, True), odd
        assert ask(port, good)[0] == 200
        http.shutdown()
