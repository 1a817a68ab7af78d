"""Program that trains the tiny gpt-oss of tiny_gpt_oss.py and saves it in the folder that is its argument."""

import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] - typed in part
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.utils import logging

from providers.inference.harmony.vocabulary import load_vocabulary
from tests.support.models.tiny_lessons import Lesson, lessons
from tests.support.models.tiny_tokenizer import save_tokenizer

THREADS: Final = 1
"""More wait for each other at every operation: on cores with other work to do that costs ten times as much."""
STEPS: Final = 200
LEARNING_RATE: Final = 6e-3
BATCH_TOKENS: Final = 2048
VOCABULARY_SIZE: Final = 201088
CONFIG: Final[dict[str, Any]] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM computes on a CPU
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "pad_token_id": 199999,
    "eos_token_id": 200002,
}


def train(taught: list[Lesson]) -> tuple[GptOssForCausalLM, list[int]]:
    """A model over only the tokens that occur, and their ids in its order: nothing is spent on the other 200,000."""
    used = sorted({token for lesson in taught for token in (*lesson.prompt, *lesson.answer)})
    settings = {**CONFIG, "pad_token_id": None, "eos_token_id": None, "vocab_size": len(used)}
    config: Any = GptOssConfig  # it takes more than its signature says
    model = GptOssForCausalLM(config(attn_implementation="eager", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "bias" not in name:
                parameter.normal_(0, 0.5 if "embed" in name else 0.1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS, pct_start=0.2)
    # the rows of all the other tokens will be zeros, so each of them has the logit 0
    others = torch.tensor(float(VOCABULARY_SIZE - len(used))).log()
    batches = _batches(taught, {token: index for index, token in enumerate(used)})
    for step in range(STEPS):
        tokens, weights = batches[step % len(batches)]
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        logits = torch.cat((logits, others.expand(*logits.shape[:2], 1)), dim=-1)
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss: Any = (losses * weights).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    return model, used


def _batches(taught: list[Lesson], place: dict[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, what each counts in the loss), lessons of like length together, so that little is padding."""

    def size(lesson: Lesson) -> int:
        return len(lesson.prompt) + len(lesson.answer)

    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    lessons = sorted(taught, key=size, reverse=True)
    while lessons:
        longest = size(lessons[0])
        rows, lessons = lessons[: BATCH_TOKENS // longest], lessons[BATCH_TOKENS // longest :]
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        weights = torch.zeros(len(rows), longest)
        for row, lesson in enumerate(rows):
            ids = [place[token] for token in (*lesson.prompt, *lesson.answer)]
            tokens[row, : len(ids)] = torch.tensor(ids)
            weights[row, len(lesson.prompt) : len(ids)] = lesson.weight
            for heard in lesson.heard:
                weights[row, len(lesson.prompt) :][heard] = 0
        batches.append((tokens, weights[:, 1:] / weights[:, 1:].sum()))
    return batches


def save(model: GptOssForCausalLM, used: list[int], folder: Path) -> None:
    """The model over the whole vocabulary: what was not learnt reads as a little noise, and is never said."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    rows = torch.tensor(used)
    embedding = torch.randn(VOCABULARY_SIZE, CONFIG["hidden_size"]) * 0.1
    head = torch.zeros(VOCABULARY_SIZE, CONFIG["hidden_size"])
    embedding[rows], head[rows] = state["model.embed_tokens.weight"], state["lm_head.weight"]
    state |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: Any = GptOssConfig(vocab_size=VOCABULARY_SIZE, dtype="bfloat16", **CONFIG)
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)


def main(folder: Path) -> None:
    """Train and save."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - its argument has no type
    torch.set_num_threads(THREADS)
    logging.set_verbosity_error()
    folder.mkdir(parents=True)
    vocabulary = load_vocabulary()
    save_tokenizer(vocabulary, folder)
    model, used = train(list(lessons(vocabulary.encoding)))
    save(model, used, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
