"""`LLM`: the offline front end. Prompts in, `RequestOutput` out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from slotline.core.api.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from slotline.core.api.prompts import Prompt, as_params, as_prompts, of_task
from slotline.core.batch.request import Request
from slotline.core.engine.engine import Engine
from slotline.llm.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from slotline.llm.best_of import best_of, check_best_of
from slotline.llm.chat_reader import chat_readers, shown_tools
from slotline.llm.options import known_options
from slotline.llm.pooled_texts import with_prompt
from slotline.llm.progress import Progress, as_progress, progress_bar
from slotline.llm.rewards import rewarding
from slotline.llm.scoring import scoring
from slotline.llm.settings import load_settings
from slotline.llm.submitter import Submitter
from slotline.llm.transcription import TranscriptionOptions, transcription
from slotline.llm.transcripts import Transcript
from slotline.llm.truncation import truncated
from slotline.ranks.expert_balance import COUNT, NOT_COUNTED, BalanceReport
from slotline.ranks.ranked_engine import RankedEngine
from slotline.ranks.replicas.front import Front, end_front, engine_of, scale_front, start_front
from slotline.ranks.replicas.growth import ScaleReport
from slotline.ranks.replicas.replica_front import ReplicaFront
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import PoolingParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import ConfigError, ModelError, RequestError
from slotline.registry.lora_request import AdapterChoice, LoRARequest, as_lora_requests
from slotline.registry.named_path import as_path
from slotline.registry.negotiation import Plan
from slotline.registry.safe_repr import safe_repr
from slotline.text.messages import as_conversations
from slotline.text.template import chat_options
from slotline.text.tokenizer import Tokenizer


class LLM:
    """A model ready to generate, offline.

    Example:
        >>> llm = LLM()  # the small model that ships with slotline
        >>> llm.generate("def main(", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    Args:
        config: a TOML file, a checkpoint folder or GGUF file, what `load_config` returned, or None.
        overrides: settings in the form `a.b=value`, as on the command line.
        settings: settings by name: `model=...`, `backend="torch"`, `max_model_len=...`, or any dotted key through a
            mapping, `**{"cache.block_size": 32}`.

    Several threads may call the methods of one `LLM`: each gets its own outputs, and their requests share the steps.

    Raises:
        SlotlineError: of the kind that fits: configuration, plugin, negotiation, model or capacity.
    """

    def __init__(
        self, config: str | Path | LoadedConfig | None = None, *, overrides: Sequence[str] = (), **settings: Any
    ) -> None:
        self.loaded: LoadedConfig = load_settings(config, overrides, settings)
        self.front: Front = start_front(self.loaded)
        self.submitter = Submitter(self.front)
        self._weights: Path | None = None

    def close(self) -> None:
        """End the processes of the engine's other ranks, if it has any. It takes no more requests then.

        Otherwise they end with this object, or with the program.
        """
        end_front(self.front)

    @property
    def engine(self) -> Engine:
        """Return the engine.

        Raises:
            RequestError: with `parallel.data` above 1, since the engines run in other processes.
        """
        return engine_of(self.front)

    @property
    def plan(self) -> Plan:
        """Return the plan: the parts that run, with reasons."""
        return self.front.plan

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            RequestError: if the model has none.
        """
        return self.submitter.tokenizer

    def update_config(self, **settings: Any) -> None:
        """Change the settings of the next `reload_weights`: `model`, the checkpoint's folder. The plan stays as it is.

        Raises:
            ConfigError: for any other setting, since the engine is already built with it. Nothing is changed then.
        """
        fixed = sorted(settings.keys() - {"model"})
        if fixed:
            raise ConfigError(f"{', '.join(fixed)} cannot change while the engine runs", fix="build a new LLM")
        if "model" in settings:
            folder = as_path(settings["model"])
            if folder is None:
                raise ConfigError(f"model={safe_repr(settings['model'])} is no path", fix="name a checkpoint's folder")
            self._weights = Path(folder)

    @known_options
    def reload_weights(self) -> None:
        """Read the weights again, in place, and forget the prefixes computed with the old ones.

        The weights come from the folder last given to `update_config`, else from the model's own.

        Raises:
            RequestError: if a request is unfinished, or if the merged adapter cannot be merged into the new weights. In
                the
                second case the new weights stay without the adapter.
            ModelError: if the weights are missing or do not fit. The old ones stay.
        """
        self.front.reload_weights(self._weights)

    @known_options
    def rebalance_experts(self) -> BalanceReport:
        """Place the experts of mixtures among the ranks by the tokens that they had since the last time.

        Captured graphs and unfinished requests go on. `parallel.rebalance_steps` does the same between steps.

        Raises:
            RequestError: if the tokens of experts are not counted, or with `parallel.data` above 1.
        """
        engine = self.engine
        if not isinstance(engine, RankedEngine):
            raise RequestError(NOT_COUNTED, fix=COUNT)
        return engine.rebalance_experts()

    @known_options
    def scale(self, data: int, *, timeout: float | None = None) -> ScaleReport:
        """Let so many replicas take requests, while those that are unfinished go on.

        It returns once further replicas are built and take requests. Replicas above the number take no more, and end
        with their last request. If they share experts with the others, the call returns after that.

        Args:
            data: as `parallel.data`.
            timeout: seconds to wait for requests of replicas that share experts and are to end. None for no limit.

        Raises:
            RequestError: if it is no positive number, the engine began without replicas, or the time is over. As many
                replicas take requests as before then.
            ConfigError: if there are too few devices.
            RankError: if a replica has failed.
            SlotlineError: what a new replica raised while it was built. The others go on as before.
        """
        return scale_front(self.front, data, timeout, self.front.step)

    @known_options
    def save_weights(self, folder: str | Path) -> None:
        """Write the weights as they are after the passes, and the rest of the checkpoint, into a new folder.

        An engine on that folder reads them without running the passes again. A merged adapter is part of the weights.

        Args:
            folder: must not exist, or be empty.

        Raises:
            ConfigError: if the folder is no path.
            ModelError: if this model cannot be saved, or the folder cannot be written.
        """
        path = as_path(folder)
        if path is None:
            raise ConfigError(f"folder={safe_repr(folder)} is no path", fix="name a new folder")
        if isinstance(self.front, ReplicaFront):
            self.front.ask_first(_save_weights, Path(path))
        else:
            _save_weights(self.front, Path(path))

    @known_options
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before it is needed. Return False if it was already known.

        It takes a slot on the device if one is free or idle, else when its first request joins the batch.

        Raises:
            RequestError: if it cannot be held, or another adapter has its name or number.
        """
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"{safe_repr(lora_request)} is no adapter", fix="give LoRARequest(name, number, path)")
        with self.front.plugins.naming():
            known = self.submitter.know(lora_request)
        return not known

    @known_options
    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter. Return False if none has this number.

        Raises:
            RequestError: if a request uses it.
        """
        with self.front.plugins.naming():
            removed: bool = self.submitter.change_adapters("remove", lora_id)
        return removed

    @known_options
    def pin_lora(self, lora_id: int) -> bool:
        """Keep a known adapter in its slot on the device until it is removed.

        Raises:
            RequestError: if it is not known, or if there is no slot for it.
        """
        with self.front.plugins.naming():
            self.submitter.change_adapters("pin", lora_id)
        return True

    @known_options
    def list_loras(self) -> set[int]:
        """Return the numbers of the known adapters, on the device or in host memory."""
        return self.front.exclusively(lambda: self.submitter.adapters.numbers)

    @known_options
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: bool | None = None,
        use_tqdm: Progress = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt. The outputs come in the prompts' order.

        Args:
            prompts: one prompt or many. A prompt is a text, token ids, or a mapping with `prompt` or `prompt_token_ids`
                and optionally `multi_modal_data`, `priority`, `cache_salt`, `request_id` and `scheduling`.
                `multi_modal_data` maps a modality, for example ``image``, to an item or to a list with one for each of
                its placeholders in the prompt. `scheduling` is what the scheduler policy reads, ``{"tenant": "a"}``.
            sampling_params: one for all prompts, or one for each.
            lora_request: an adapter for all prompts, or an adapter or None for each. The name of a loaded adapter also
                works.
            progress: show a progress bar. The default follows `observability.progress`, on a terminal only.
            use_tqdm: vLLM's name for the same, or a class that makes the bar, as `tqdm.tqdm` does.

        Raises:
            RequestError: if a prompt or its parameters are wrong. No request of the call runs then.
        """
        shown = as_progress(progress, use_tqdm)
        given = as_prompts(prompts)
        params = self.submitter.params(sampling_params, len(given))
        return self.generate_as_given(given, params, as_lora_requests(lora_request, len(given)), shown)

    def generate_as_given(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        adapters: Sequence[AdapterChoice],
        progress: Progress,
    ) -> list[RequestOutput]:
        """Generate for each prompt with its parameters as they are, without the model's defaults."""
        check_best_of(params, self.loaded.config.sampling.logprobs_mode)
        groups = self.submitter.submit_all(prompts, params, adapters)
        self._run(groups, progress)
        return [best_of(self.front.output(group), one) for group, one in zip(groups, params, strict=True)]

    @known_options
    def transcribe(
        self,
        recordings: Any,
        *,
        task: str = "transcribe",
        language: str | None = None,
        prompt: str | None = None,
        timestamps: bool = False,
        temperature: float = 0.0,
        details: bool = False,
    ) -> list[Transcript]:
        """Write down what is said in recordings of any length, with a speech model.

        Args:
            recordings: one, or a list. A recording is an array [n] of samples, a pair of samples and their rate in Hz,
                or the bytes of a file.
            task, language, prompt, timestamps, temperature, details: see `TranscriptionOptions`.

        Raises:
            RequestError: if the model does not transcribe, or a recording or an option is wrong. Nothing runs then.
        """
        options = TranscriptionOptions(
            task=task,
            language=language,
            prompt=prompt,
            timestamps=timestamps,
            temperature=temperature,
            details=details,
        )
        given = recordings if isinstance(recordings, list) else [recordings]
        steps = [transcription(self.submitter, one, options).steps() for one in given]
        asks, done = {number: next(one) for number, one in enumerate(steps)}, dict[int, Transcript]()
        while asks:
            params, adapters = [ask.params for ask in asks.values()], [None] * len(asks)
            outputs = self.generate_as_given([ask.prompt for ask in asks.values()], params, adapters, False)
            for number, output in zip(list(asks), outputs, strict=True):
                try:
                    asks[number] = steps[number].send(output.outputs[0])
                except StopIteration as end:
                    done[number] = end.value
                    del asks[number]
        return [done[number] for number in range(len(given))]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that sets none: the model's own defaults if it has any."""
        return SamplingParams().with_defaults(self.front.sampling_defaults)

    @known_options
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: bool | None = None,
        use_tqdm: Progress = None,
    ) -> list[BeamSearchOutput]:
        """Find the most likely continuations of each prompt by beam search, best first.

        Every round is one step for all beams of all prompts. With prefix caching, a beam computes only its newest token
        and the tokens of its last, incomplete block.

        Args:
            prompts: texts, token ids, or mappings with `prompt` or `prompt_token_ids` and optionally `cache_salt`.
            params: the same for all.
            lora_request: as for `generate`.
            progress, use_tqdm: as for `generate`. A round is a step of the bar.

        Raises:
            RequestError: if a prompt or the parameters are wrong, or if log-probabilities are not available.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(
                f"params={safe_repr(params)} is no BeamSearchParams", fix="give BeamSearchParams(beam_width=..., ...)"
            )
        shown = as_progress(progress, use_tqdm)
        fields = [self.submitter.fields(prompt) for prompt in as_prompts(prompts)]
        for one, adapter in zip(fields, as_lora_requests(lora_request, len(fields)), strict=True):
            if adapter is not None:
                one["lora_request"] = self.submitter.adapter(adapter)
        with self.front.plugins.naming():
            return BeamSearch(self, params, fields).run(shown)

    @known_options
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        prompt_name: str | None = None,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: bool | None = None,
        use_tqdm: Progress = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool the hidden states of each prompt. The outputs come in the prompts' order.

        Args:
            prompts: as for `generate`.
            pooling_params: one for all prompts, or one for each.
            pooling_task: the task of parameters that name none. One of the two must name it.
            prompt_name: a prompt of the checkpoint to put before each text, for ``embed`` and ``token_embed``. None for
                the checkpoint's default, if it has one.
            lora_request, progress, use_tqdm: as for `generate`.

        Raises:
            RequestError: if a prompt or its parameters are wrong, or the engine runs another task. No request of the
                call runs
                then.
        """
        given = as_prompts(prompts)
        params = as_params(pooling_params, len(given), PoolingParams())
        tasked = [of_task(one, pooling_task) for one in params]
        tasks = [one.task for one in tasked]
        shown = as_progress(progress, use_tqdm)
        given = [with_prompt(self.submitter, *pair, prompt_name) for pair in zip(given, tasks, strict=True)]
        given = [truncated(self.submitter, *pair) for pair in zip(given, tasked, strict=True)]
        groups = self.submitter.submit_all(given, tasked, as_lora_requests(lora_request, len(given)))
        self._run(groups, shown)
        return [self.front.extension("pooling").output(request) for (request,) in groups]

    @known_options
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        prompt_name: str | None = None,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: bool | None = None,
        use_tqdm: Progress = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding for each prompt, see `encode`. Needs an engine whose task is ``embed``."""
        outputs = self.encode(
            prompts,
            pooling_params,
            pooling_task="embed",
            prompt_name=prompt_name,
            lora_request=lora_request,
            progress=progress,
            use_tqdm=use_tqdm,
        )
        return cast(list[EmbeddingRequestOutput], outputs)

    @known_options
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: bool | None = None,
        use_tqdm: Progress = None,
    ) -> list[ClassificationRequestOutput]:
        """Return class scores for each prompt, see `encode`. Needs an engine whose task is ``classify``."""
        outputs = self.encode(
            prompts,
            pooling_params,
            pooling_task="classify",
            lora_request=lora_request,
            progress=progress,
            use_tqdm=use_tqdm,
        )
        return cast(list[ClassificationRequestOutput], outputs)

    @known_options
    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        step_token: str | int | None = None,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: bool | None = None,
        use_tqdm: Progress = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the reward of each prompt [1], or of each of its steps [num_steps].

        Args:
            prompts, lora_request, progress, use_tqdm: as for `encode`.
            pooling_params: for all prompts.
            step_token: the token, or its id, that ends a step. Its reward is the probability of the last class there.
                None for the reward of the whole text, without an activation.

        Raises:
            RequestError: if a prompt is wrong, or the model gives no such rewards. No request of the call runs then.
        """
        asked = rewarding(self.submitter, pooling_params, step_token)
        return asked.outputs(
            self.encode(prompts, asked.params, lora_request=lora_request, progress=progress, use_tqdm=use_tqdm)
        )

    @known_options
    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        score_type: str | None = None,
        prompt_name: str | None = None,
        instruction: str | None = None,
        lora_request: AdapterChoice = None,
        progress: bool | None = None,
        use_tqdm: Progress = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts.

        A model with one label reads both texts of a pair. Others embed each text once, and the score is the cosine, or
        MaxSim over the tokens' embeddings.

        Args:
            first: a text that goes with each of `second`, or one for each of them.
            second: a text, or several.
            pooling_params: for all prompts.
            score_type: ``cross-encoder``, ``bi-encoder`` or ``late-interaction``. None for the model's own.
            prompt_name: the prompt of the checkpoint before each first text, in place of the one for queries.
            instruction: its text, for a model that reads both texts.
            lora_request, progress, use_tqdm: as for `generate`.

        Raises:
            RequestError: if a text is wrong, or the model scores no pairs. No request of the call runs then.
        """
        asked = scoring(
            self.submitter,
            first,
            second,
            score_type=score_type,
            prompt_name=prompt_name,
            instruction=instruction,
            pooling_params=pooling_params,
        )
        params = asked.params(pooling_params)
        found = self.encode(asked.prompts, params, lora_request=lora_request, progress=progress, use_tqdm=use_tqdm)
        return asked.outputs(found)

    def _run(self, groups: list[list[Request]], progress: Progress) -> None:
        """Run until all requests finish. Abort them on an error or interrupt.

        Requests may end in another thread's step or be aborted by a callback, so each request is checked.
        """
        unfinished = [request for group in groups for request in group]
        enabled = self.loaded.config.observability.progress
        try:
            with progress_bar(len(unfinished), enabled=enabled, asked=progress) as bar:
                while unfinished:
                    if unfinished[-1].finished:
                        unfinished.pop()
                        continue
                    result = self.front.step()
                    bar.advance(len(result.finished), tokens=len(result.token_ids))
        except BaseException:
            self.submitter.abort(unfinished)
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: AdapterChoice | Sequence[AdapterChoice] = None,
        progress: bool | None = None,
        use_tqdm: Progress = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tools: Sequence[Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the assistant's turn of one conversation or of many.

        A message's content may be a list of parts, for example ``{"type": "text", "text": "..."}`` and
        ``{"type": "image", "image": image}``, as in transformers. If a template prints the content as one text, the
        parts are joined by line breaks, as in vLLM.

        Args:
            messages: one conversation or many.
            sampling_params, lora_request, progress, use_tqdm: as for `generate`.
            chat_template: a template in place of the tokenizer's, or the name of one of its templates.
            chat_template_content_format: ``string`` or ``openai`` for templates that read a content as one text or as a
                list of parts. ``auto`` inspects the template.
            add_generation_prompt: begin the assistant's turn. This is the default, unless the last message is
                continued.
            continue_final_message: leave the last message open, so that the output continues it, or the name of the
                field to continue instead of its content.
            tools: functions with type hints, or JSON schemas.
            tool_choice: ``none``, ``auto``, ``required`` or ``{"type": "function", "function": {"name": ...}}``. Then
                each output has a `message` with content, reasoning and calls. None to leave the text unread.
            parallel_tool_calls: whether there may be several calls, which is the default.
            documents: documents that the template shows in addition to the messages.
            chat_template_kwargs, template_options: variables that the template reads, for example ``enable_thinking``.

        Raises:
            RequestError: if a message cannot be read, the template does not read an option, or the template refuses the
                messages or does not terminate. No request of the call runs then.
        """
        options = chat_options(
            chat_template_kwargs,
            template_options,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=shown_tools(tools, tool_choice, parallel_tool_calls),
            documents=documents,
        )
        prompts = [self.submitter.chat_prompt(conversation, options) for conversation in as_conversations(messages)]
        more: dict[str, Any] = {"lora_request": lora_request, "progress": progress, "use_tqdm": use_tqdm}
        if tool_choice is None:
            return self.generate(prompts, sampling_params, **more)
        given = as_params(sampling_params, len(prompts), SamplingParams())
        readers = chat_readers(
            self.front, prompts, given, tools=tools, choice=tool_choice, parallel=parallel_tool_calls
        )
        outputs = self.generate(prompts, [reader.params for reader in readers], **more)
        return [reader.read(output) for reader, output in zip(readers, outputs, strict=True)]

    @known_options
    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora_request: AdapterChoice = None
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield its output so far after each step, until it is finished."""
        params = self.submitter.params(sampling_params, 1)
        if isinstance(params[0], SamplingParams) and (params[0].best_of or 1) > params[0].n:
            raise RequestError(
                f"best_of={params[0].best_of} in a stream: which outputs are best is known at the end",
                fix="leave best_of out, or use generate()",
            )
        (group,) = self.submitter.submit_all(
            [prompt], params, as_lora_requests(lora_request, 1), stream=True
        )  # immediately, so that a mistake is raised here
        return self._stream(group)

    def _stream(self, group: list[Request]) -> Iterator[RequestOutput]:
        try:
            finished = False
            while not finished:
                if not all(request.finished for request in group):  # another caller's steps may have ended it
                    self.front.step()
                output = self.front.output(group)
                finished = output.finished
                yield output
        finally:
            self.submitter.abort(group)


def _save_weights(engine: Engine, folder: Path) -> None:
    """Write the weights of an engine of this process."""
    model = engine.runner.model
    save = getattr(model, "save_weights", None)
    if save is None:
        raise ModelError(f"the weights of a {type(model).__name__} cannot be saved", fix="use the checkpoint itself")
    with engine.plugins.naming():
        engine.exclusively(save, folder)
