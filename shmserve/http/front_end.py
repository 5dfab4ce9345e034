"""What the handlers of one front end share, and the verdict on a request before any work is done for it.

Owns: the `FrontEnd` context, built once and never changed. Never: submits anything (generation.py does). Event loop's thread only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from aiohttp import web

from shmserve.config import Config
from shmserve.http import fields
from shmserve.http.admission import PARTY, Admission
from shmserve.http.client import WorkerClient
from shmserve.http.deadlines import DEADLINE, PARSED, deadline_of
from shmserve.http.errors import ApiError
from shmserve.http.request_book import RequestBook
from shmserve.http.request_templates import RequestTemplates
from shmserve.http.routing import RANK, not_serving, rank_of
from shmserve.http.slow_client import SlowClients
from shmserve.http.structured import Grammars
from shmserve.http.template import ChatTemplate
from shmserve.http.tokenizer import Tokenizer
from shmserve.http.turnstile import Turnstile
from shmserve.models import PreparedModel
from shmserve.rings.board import Board


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Built once, when the process starts. `template` is None if the model has none."""

    config: Config
    model: PreparedModel
    served_name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    own_templates: RequestTemplates
    grammars: Grammars
    client: WorkerClient
    admission: Admission
    turnstile: Turnstile
    slow_clients: SlowClients
    board: Board
    started_at: int  # wall clock, s: the "created" of the model
    book: RequestBook | None = None  # where somebody wants to hear of every request

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and completion together, that the worker takes; the model's own context until it has said."""
        links = self.client.links.values()
        told = [int(link.info["max_model_len"]) for link in links if "max_model_len" in link.info]
        if told:
            return min(told)  # of several workers: any may get it
        return self.config.model.max_model_len or self.model.context_length

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served; none named means ours."""
        if name is not None and name not in (self.served_name, "unknown"):
            raise ApiError(
                404,
                f"The model `{name[:200]}` does not exist. This server serves `{self.served_name}`.",
                param="model",
                code="model_not_found",
            )

    def admit(
        self,
        request: web.Request,
        num_sequences: int,
        *,
        priority: int | None = None,
        timeout_ms: int | None = None,
        least_tokens: int = 0,
        rank: int | None = None,
    ) -> None:
        """The verdict on a request, before any work is done for it; its places are given back when it has been answered.

        `priority` is vLLM's: lower is better. `least_tokens`: its prompts have so many at least. `rank`: the worker that the body names.
        Raises ApiError.
        """
        named = rank_of(request, rank, len(self.client.links))
        if named is not None:
            request[RANK] = named
            if not self.client.links[named].is_serving and not self.admission.is_draining:
                self.admission.refused("no_worker")
                raise not_serving(self.client.links[named])
        request[PARSED] = time.monotonic_ns()
        rank = fields.in_range("priority", priority, -(2**31), 2**31 - 1, 0)
        request[DEADLINE] = deadline_of(request, timeout_ms)
        request[PARTY] = self.admission.enter(
            num_sequences, priority=rank, least_tokens=least_tokens
        )

    def release(self, request: web.Request) -> None:
        """It has been answered: places that it holds without a sequence are free."""
        party = request.get(PARTY)
        if party is not None:
            self.admission.close(party)

    def room_for(self, num_prompt_tokens: int, param: str) -> int:
        """How many tokens may follow a prompt. 400 if none may: a prompt is never cut unasked."""
        limit = self.max_model_len
        if num_prompt_tokens == 0:
            raise ApiError(400, f"{param} holds no tokens", param=param, code="empty_prompt")
        if num_prompt_tokens >= limit:
            raise ApiError(
                400,
                f"Input length ({num_prompt_tokens}) exceeds model's maximum context length ({limit}): "
                "a prompt and at least one new token must fit.",
                param=param,
                code="context_length_exceeded",
            )
        return limit - num_prompt_tokens
