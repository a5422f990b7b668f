"""What a recipe leaves out on purpose: a pattern, other languages, evaluation prompts."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eyas.data.contamination import Contamination, user_turns
from eyas.data.encode import Encoder
from eyas.data.records import Conversation, Pretokenised, Rejected
from eyas.errors import RecipeError

# The language of a longer text is told by its beginning.
_CHARACTERS = 1000


@dataclass(frozen=True)
class Filters:
    """Filters of a recipe; all empty ones let everything pass.

    Attributes:
        drop_pattern: regular expression, searched for in every turn.
        languages: ISO 639-1 codes that are kept.
        contamination: evaluation prompts that training must not see; held-out records may hold them.
    """

    drop_pattern: str
    languages: list[str]
    contamination: Contamination | None

    def check_turns(self, body: Conversation, split: str) -> None:
        """Raises: Rejected where a filter leaves the conversation out; RecipeError without py3langid."""
        if self.drop_pattern:
            for message in body.messages:
                if found := re.search(self.drop_pattern, message["content"]):
                    raise Rejected("drop_pattern", found[0])
        if self.languages:
            text = " ".join(message["content"] for message in body.messages if message["role"] != "system")
            if (language := language_of(text)) not in self.languages:
                raise Rejected("language", language)
        self._check_prompts(user_turns(body.messages), split)

    def check_tokens(self, body: Pretokenised, split: str, encoder: Encoder) -> None:
        """The same of token ids: only evaluation prompts are looked for, in what is not supervised."""
        if self.contamination is not None:
            context = [token for token, mine in zip(body.token_ids, body.loss_mask, strict=True) if not mine]
            self._check_prompts([encoder.decode(context)], split)

    def _check_prompts(self, turns: list[str], split: str) -> None:
        if self.contamination is not None and split != "heldout" and (held := self.contamination.find(turns)):
            raise Rejected("evaluation_prompt", held)


def language_of(text: str) -> str:
    """ISO 639-1 code of a text's most likely language.

    Raises: RecipeError where py3langid isn't installed.
    """
    return str(_classifier().classify(text[:_CHARACTERS])[0])


@lru_cache(maxsize=1)
def _classifier() -> Any:
    try:
        import py3langid
    except ModuleNotFoundError:
        raise RecipeError(
            "data.languages is set, but py3langid is not installed",
            cause="it comes with an extra of Eyas",
            next="pip install 'eyas[language]'",
        ) from None
    return py3langid
