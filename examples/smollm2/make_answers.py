"""Regenerate answers.jsonl.gz: the demo target's own greedy answers, in fp32, to all demo prompts.

Usage: python make_answers.py [--out FILE] [--threads N]     (about 15 minutes on two idle cores)

Training prompts are answered in batches. Held-out ones are answered one at a time, so that their answers are exactly
what plain decoding gives: a batch may round differently, which decides where two tokens are nearly tied.
Finished answers are kept in FILE.partial: after an interruption the same command goes on from there.

Each line: {"id", "kind", "split", "messages", "prompt_ids", "response_ids"}; response_ids ends with the end-of-turn
token unless the answer was cut at 96 tokens.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from make_prompts import Prompt, heldout_prompts, training_prompts
from make_target import make_target
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

Record = dict[str, Any]

DEFAULT_OUT = Path(__file__).parent / "answers.jsonl.gz"
MAX_NEW_TOKENS = 96
BATCH = 128  # twice the tokens/s of 32 on two cores


def render(tokenizer: Any, prompt: Prompt) -> Record:
    """The record of a prompt, still without its answer."""
    messages = [{"role": "user", "content": prompt.text}]
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return {
        "id": prompt.id,
        "kind": prompt.kind,
        "split": prompt.split,
        "messages": messages,
        "prompt_ids": prompt_ids,
    }


def plan_batches(records: list[Record]) -> Iterator[list[Record]]:
    """Training records of like length together, held-out ones alone. Always the same, so that a resumed run is too."""
    train = sorted((r for r in records if r["split"] == "train"), key=lambda r: len(r["prompt_ids"]))
    for start in range(0, len(train), BATCH):
        yield train[start : start + BATCH]
    for record in records:
        if record["split"] == "heldout":
            yield [record]


@torch.inference_mode()
def answer(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int = MAX_NEW_TOKENS) -> list[list[int]]:
    """Greedy answers to token ids, each with its end-of-turn token where it was reached."""
    end = model.generation_config.eos_token_id
    width = max(len(ids) for ids in prompts)
    input_ids = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    output = model.generate(
        input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, do_sample=False
    )
    answers = output[:, width:].tolist()
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in answers]


def read_partial(path: Path, records: list[Record]) -> dict[str, Record]:
    """Answered records of an earlier run, by id; those whose prompt has changed and a torn last line are left out."""
    prompts = {record["id"]: record["prompt_ids"] for record in records}
    done: dict[str, Record] = {}
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                if prompts.get(record["id"]) == record["prompt_ids"]:
                    done[record["id"]] = record
    return done


def to_lines(records: list[Record]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in records)


def report(records: list[Record], end: int) -> str:
    answers = [record["response_ids"] for record in records]
    ended = sum(ids[-1] == end for ids in answers)
    return (
        f"{len(records)} samples, {sum(len(record['prompt_ids']) for record in records)} prompt tokens, "
        f"{sum(map(len, answers))} answer tokens ({len(set().union(*answers))} different ones), "
        f"{ended / len(records):.0%} ended by end-of-turn"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Regenerate the answers of the demo target to the demo's prompts.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"file to write (default: {DEFAULT_OUT})")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = make_target()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    records = [render(tokenizer, prompt) for prompt in (*training_prompts(), *heldout_prompts())]
    partial = args.out.parent / f"{args.out.name}.partial"
    done = read_partial(partial, records)
    partial.write_text(to_lines(list(done.values())))
    print(f"{len(done)} of {len(records)} answers are there already", flush=True)

    start, made, answered = time.monotonic(), 0, 0
    remaining = len(records) - len(done)
    with partial.open("a") as file:
        for batch in plan_batches(records):
            if all(record["id"] in done for record in batch):
                continue
            answers = answer(model, [record["prompt_ids"] for record in batch])
            batch = [{**record, "response_ids": ids} for record, ids in zip(batch, answers, strict=True)]
            file.write(to_lines(batch))
            file.flush()
            answered += sum(record["id"] not in done for record in batch)
            done |= {record["id"]: record for record in batch}
            made += sum(map(len, answers))
            elapsed = time.monotonic() - start
            print(
                f"{len(done)}/{len(records)} answers, {made / elapsed:.0f} tokens/s, "
                f"{elapsed / answered * (remaining - answered) / 60:.1f} min left",
                flush=True,
            )

    finished = [done[record["id"]] for record in records]
    packed = args.out.parent / f"{args.out.name}.packed"
    packed.write_bytes(gzip.compress(to_lines(finished).encode(), mtime=0))  # no date: same answers, same bytes
    packed.replace(args.out)
    partial.unlink()
    for split in ("train", "heldout"):
        print(f"{split}: {report([r for r in finished if r['split'] == split], model.generation_config.eos_token_id)}")
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
