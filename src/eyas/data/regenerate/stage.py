"""The stage `regenerate`: prompts of all sources, answered by the target, to regenerated/."""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from eyas import fs
from eyas.data.make import Maker
from eyas.data.prepare import find_files, make_maker, source_identity, source_name
from eyas.data.records import Rejected
from eyas.data.regenerate.journal import Journal, content_digest
from eyas.data.regenerate.plan import Open, Plan, make_plan
from eyas.data.regenerate.protocol import Protocol
from eyas.data.regenerate.servers import Servers
from eyas.data.regenerate.transcript import Transcript
from eyas.errors import DataError, EngineError, Interrupted, RecipeError
from eyas.progress import Progress, say
from eyas.record import Inputs
from eyas.run import Run
from eyas.signals import Stop, stop_on_signals
from eyas.stages import Result, remove_tree
from eyas.target import load_target

# What answers depend on; where and how fast they are asked is not part of it.
_SETTINGS = ("temperature", "top_p", "top_k", "max_new_tokens", "seed", "cut_answers", "max_conversations")
_STOP_POLL_S = 0.2


def inputs(run: Run) -> Inputs:
    """What regenerated/ depends on: sources, target, template, sampling.

    Raises: RecipeError where the recipe names no server.
    """
    settings, data, target = run.recipe.regenerate, run.recipe.data, load_target(run.recipe.target)
    if not settings.servers:
        raise RecipeError(
            "the recipe names no server that runs the target",
            expected="regenerate.servers = ['http://HOST:PORT']; without it the sources' own answers are taken",
            next="serve the target (vllm serve TARGET --port 8000) and name it, or go on with `eyas prepare`",
        )
    template = make_maker(data, target).template
    pairs: Inputs = {f"regenerate.{key}": getattr(settings, key) for key in _SETTINGS}
    pairs |= {f"data.{key}": getattr(data, key) for key in ("max_tokens", "mend", "limit", "seed")}
    pairs |= {f"data.{key}": getattr(data, key) for key in ("drop_pattern", "languages", "evaluation_prompts")}
    for index, source in enumerate(data.sources):
        pairs[f"data.sources.{index}"] = [source.path, source.preset, source.revision, source.format, source.split]
    pairs |= {f"content of {path}": source_identity(path) for _, path in find_files(data)}
    return pairs | {
        "target": target.model_digest,
        "tokenizer": target.tokenizer_digest,
        "chat template": template.digest if template else "",
    }


def discard(run: Run) -> None:
    """Remove all answers."""
    remove_tree(run.regenerated_dir)


def execute(run: Run) -> Result:
    """Have every answer written.

    Raises: DataError, EngineError; Interrupted after SIGINT or SIGTERM. What was answered is kept each time, and the
        next call goes on from it.
    """
    data, target = run.recipe.data, load_target(run.recipe.target)
    maker = make_maker(data, target)
    if maker.template is None:
        raise DataError(
            f"{target.path}: its tokenizer has no chat template to render prompts with",
            cause="a base model, or chat_template.jinja was not copied with the tokenizer",
            next="set data.template to a Jinja file",
        )
    spool = run.dir / f"{fs.PARTIAL_PREFIX}conversations.jsonl"
    try:
        with Journal(run.regenerated_dir, len(data.sources), inputs(run)) as journal:
            plan = make_plan(spool, data, run.recipe.regenerate, maker)
            work = _Work(run, maker, plan, journal)
            with stop_on_signals("nothing: answers that are whole are kept") as stop:
                asyncio.run(work.do(stop, target.vocab_size))
            if stop.signum is not None:
                raise _interrupted(run, work, stop.signum)
            return _result(run, work)
    finally:
        fs.remove(spool)


@dataclass
class _Work:
    """The conversations of one run and what became of them.

    Attributes:
        failed: conversations given up in this process; the journal lacks them, so a call that resumes asks them again.
        tokens: written by this process.
    """

    run: Run
    maker: Maker
    plan: Plan
    journal: Journal
    failed: dict[str, tuple[int, str]] = field(default_factory=dict)
    tokens: int = 0
    tokens_per_s: float = 0.0

    async def do(self, stop: Stop, vocab_size: int) -> None:
        """Ask until nothing is left or a stop is asked for."""
        done = {entry.id for entry in self.journal.written()} | {line["id"] for line in self.journal.refused()}
        done &= self.plan.chosen.keys()
        left = len(self.plan.chosen) - len(done)
        if not left:
            return
        settings = self.run.recipe.regenerate
        protocol = Protocol(settings, self.maker.encoder.ends, vocab_size)
        probe = self.maker.encoder.encode(["Hello"])[0]
        say(f"regenerate: {left:,} of {len(self.plan.chosen):,} conversations to write, {settings.in_flight} at once")
        async with Servers(protocol, probe) as servers:
            for server in servers.all:
                if server.up:
                    size = f", {server.context:,} tokens of context" if server.context else ""
                    say(f"regenerate: {server.url} serves {server.model or 'a model'}{size}")
            total = len(self.plan.chosen)
            with Progress("regenerate", total, "conversations", self.run.logs_dir, done=len(done)) as progress:
                todo = (item for item in self.plan if item.id not in done)
                workers = [
                    asyncio.create_task(self._write_all(todo, servers, progress))
                    for _ in range(min(settings.in_flight, left))
                ]
                await _until_done(workers, stop)
                self.tokens_per_s = self.tokens / max(progress.elapsed_s, 1e-9)

    async def _write_all(self, todo: Iterator[Open], servers: Servers, progress: Progress) -> None:
        for item in todo:
            await self._write(item, servers)
            speed = self.tokens / max(progress.elapsed_s, 1e-9)
            up = sum(server.up for server in servers.all)
            progress.advance(1, f"{speed:,.0f} tokens/s, {up} of {len(servers.all)} servers")

    async def _write(self, item: Open, servers: Servers) -> None:
        """One conversation, its turns in order; it ends early where an answer is cut off or a turn can't be asked."""
        settings = self.run.recipe.regenerate
        assert self.maker.template is not None
        transcript = Transcript(item.conversation, self.maker.template, self.maker.encoder)
        ended, cut = None, False
        while not transcript.finished and not cut:
            try:
                prompt = transcript.next_prompt()
                room = self._room(servers.context, len(prompt))
                seed = int(fs.digest(str(settings.seed), item.id, str(transcript.answers))[:8], 16) >> 1
                answer = await servers.ask(prompt, room, seed)
            except Rejected as rejection:
                ended = rejection
                break
            if answer.cut and settings.cut_answers == "drop":
                ended = Rejected("cut_answer", f"{len(answer.token_ids)} tokens without an end-of-turn token")
                break
            transcript.write(answer.token_ids)
            self.tokens += len(answer.token_ids)
            cut = answer.cut
        if ended and ended.reason == "server_error":
            self.failed[item.id] = (item.source, ended.detail)
        elif transcript.samples:
            self.journal.add(item.source, item.id, transcript.samples, cut, item.about)
        elif ended:
            self.journal.refuse(item.source, item.id, ended.reason, ended.detail)

    def _room(self, context: int, prompt: int) -> int:
        """Tokens that an answer may have. Raises: Rejected where the prompt leaves none."""
        most = min(self.run.recipe.data.max_tokens, context or self.run.recipe.data.max_tokens)
        if prompt >= most:
            raise Rejected("too_long", f"a prompt of {prompt} tokens, {most} are the most with its answer")
        return min(self.run.recipe.regenerate.max_new_tokens, most - prompt)


async def _until_done(workers: list[asyncio.Task[None]], stop: Stop) -> None:
    """Wait for all workers, or until one fails or a stop is asked for; then end the others."""
    pending = set(workers)
    try:
        while pending and stop.signum is None:
            done, pending = await asyncio.wait(pending, timeout=_STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _interrupted(run: Run, work: _Work, signum: int) -> Interrupted:
    kept = sum(1 for _ in work.journal.written())
    return Interrupted(
        signum,
        f"regenerate: stopped by {signal.Signals(signum).name}; {kept:,} of {len(work.plan.chosen):,} conversations "
        f"are kept in {run.regenerated_dir}",
        next=f"{run.command('regenerate')}   # goes on from there",
    )


def _result(run: Run, work: _Work) -> Result:
    """Digest and account over what all processes wrote.

    Raises: EngineError where servers failed on a conversation time and again, DataError where most gave nothing.
    """
    plan = work.plan
    for line in work.journal.refused():
        plan.reject(line["source"], line["reason"])
    for source, _ in work.failed.values():
        plan.reject(source, "server_error")
    refused = Counter(dict(sum(plan.rejected.values(), Counter[str]())))
    asked = len(plan.chosen)
    written = list(work.journal.written())
    if len(written) * 2 < asked:
        raise EngineError(
            f"only {len(written):,} of {asked:,} conversations got an answer: {dict(refused)}",
            expected="at least half of them",
            cause="; ".join(detail for _, detail in list(work.failed.values())[:1])
            or "prompts too long for the server",
            next=f"see {run.regenerated_dir}/refused.jsonl; mend the recipe and add --redo to ask again",
        )
    kept = Counter(plan.chosen[entry.id] for entry in written)
    by_source = {
        source_name(source): {
            "read": plan.read[index],
            "kept": kept[index],
            "rejected": dict(sorted(plan.rejected.get(index, Counter()).items())),
        }
        for index, source in enumerate(run.recipe.data.sources)
    }
    counts: dict[str, Any] = {
        "conversations": len(written),
        "answers": sum(entry.answers for entry in written),
        "tokens": sum(entry.tokens for entry in written),
        "cut_off": sum(entry.cut for entry in written),
        "tokens_per_s": round(work.tokens_per_s, 1),
        "by_source": by_source,
    }
    say(
        f"regenerate: {counts['conversations']:,} conversations, {counts['answers']:,} answers of {counts['tokens']:,} "
        f"tokens, {counts['cut_off']:,} cut off" + (f"; left out: {dict(refused)}" if refused else "")
    )
    return Result(content_digest(run.regenerated_dir), counts)
