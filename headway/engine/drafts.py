"""From ``speculative_config`` to a drafter: what it is made of, and what it needs of the engine around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.log import logger
from headway.core.speculative import SpeculativeConfig, draft_widths
from headway.models.interface import Model
from headway.models.load import admitting, load_model
from headway.models.registry import read_config
from headway.parallel.group import Group
from headway.speculative.agreed import AgreedDrafter
from headway.speculative.base import Drafter, DraftHouse, DraftModel
from headway.speculative.dflash import DFlashDrafter
from headway.speculative.dflash_config import read_dflash
from headway.speculative.dflash_load import load_dflash
from headway.speculative.dflash_model import DFlashModel
from headway.speculative.draft_model import ModelDrafter
from headway.speculative.eagle import EagleDrafter
from headway.speculative.eagle_config import read_eagle
from headway.speculative.eagle_load import load_eagle
from headway.speculative.eagle_model import EagleModel
from headway.speculative.mtp_load import load_mtp
from headway.speculative.mtp_model import MTPModel
from headway.speculative.ngram import NgramDrafter
from headway.speculative.suffix import SuffixDrafter
from headway.speculative.synthetic import SyntheticDrafter
from headway.speculative.told import FarModel, ToldDrafter
from headway.weights import Checkpoint, open_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """What a drafter's weights are loaded with.

    Attributes:
        args: the engine's.
        target: the model whose tokens are guessed; its dtype and device are the drafter's.
        dtype: of weights and activations.
        longest: positions that the drafter must be able to run.
        admitted: tokens of the longest sequence.
    """

    args: EngineArgs
    target: Model
    dtype: torch.dtype
    longest: int
    admitted: int
    progress: bool


@dataclass(frozen=True, slots=True)
class Drafts:
    """What guesses tokens ahead.

    Attributes:
        number: drafts a row, at least 1.
        drafter: makes the drafter.
        load: loads its model; None: it has none.
        lookahead, forgets_last_hit: see ``SchedulerConfig``.
        adaptive: whether steps leave them out while they do not pay.
        drawing: ``draft_sample_method``.
        reads: the layers of the target whose outputs its model reads, rising, by its files alone.
        embeds: its model reads the target's embedding.
    """

    number: int
    drafter: Callable[[DraftHouse], Drafter]
    load: Callable[[Loading], DraftModel] | None = None
    lookahead: int = 0
    forgets_last_hit: bool = False
    adaptive: bool = False
    drawing: str | None = None
    reads: Callable[[Loading], tuple[int, ...]] = lambda loading: ()
    embeds: bool = False

    def loaded(self, loading: Loading) -> DraftModel | None:
        """Its model; on a stage before the last what stands for it. None: it has none."""
        stage = loading.target.spec.stage
        if self.load is None or stage is None or stage.is_last:
            return None if self.load is None else self.load(loading)
        return FarModel.of(loading.target.spec, self.reads(loading))

    def on(self, ranks: Group, house: DraftHouse) -> Drafter:
        """The drafter on one of ``ranks``, which share the target's layers. Without a model it looks up what is the same on all
        of them. On a stage before the last there is none."""
        stage = house.target.spec.stage
        if stage is not None and not stage.is_last:
            return ToldDrafter(house.model.auxiliary if isinstance(house.model, FarModel) else ())
        found = self.drafter(house)
        if house.model is None or ranks.size == 1:
            return found
        return AgreedDrafter(house.arena, self.number, found, ranks)

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens that decode rows may have, rising."""
        return draft_widths(self.number, adaptive=self.adaptive)

    @classmethod
    def of(cls, config: SpeculativeConfig | None) -> Drafts | None:
        """What ``config`` asks for; None where there is none."""
        if config is None:
            return None
        number, length = config.num_speculative_tokens, config.synthetic_acceptance_length
        if config.method == "ngram":
            found = cls(number, lambda house: NgramDrafter(house.arena, number, *config.lookup))
        elif config.method == "suffix":
            found = cls(number, lambda house: SuffixDrafter(house.arena, number, *config.suffix))
        elif config.method in ("eagle", "eagle3"):
            found = cls(number, EagleDrafter, partial(_load_eagle, config), number, True, embeds=True)
            found = replace(found, reads=partial(_read_by_eagle, config))
        elif config.method == "mtp":
            found = cls(number, EagleDrafter, partial(_load_mtp, config), number, True, embeds=True)
        elif config.method in ("dflash", "dspark"):
            found = cls(number, DFlashDrafter, partial(_load_dflash, config), number + 1, embeds=True)
            found = replace(found, reads=partial(_read_by_dflash, config))
        else:
            found = cls(number, ModelDrafter, partial(_load_draft_model, config), number)
        found = replace(found, adaptive=config.is_adaptive, drawing=config.draft_sample_method)
        return found if length is None else _synthetic(found, length)


def _load_draft_model(config: SpeculativeConfig, loading: Loading) -> Model:
    assert config.model is not None
    logger.info("draft model %s", config.model)
    checkpoint = open_checkpoint(config.model, revision=config.revision, load_format=loading.args.load_format)
    return load_model(
        checkpoint,
        dtype=loading.dtype,
        device=loading.target.device,
        max_model_len=loading.longest,
        progress=loading.progress,
        seed=loading.args.seed,
        config=admitting(read_config(checkpoint.config), loading.admitted),
    )


def _head(config: SpeculativeConfig, loading: Loading) -> Checkpoint:
    assert config.model is not None
    return open_checkpoint(config.model, revision=config.revision, load_format=loading.args.load_format, integers=True)


def _read_by_eagle(config: SpeculativeConfig, loading: Loading) -> tuple[int, ...]:
    third = config.method == "eagle3"
    return read_eagle(_head(config, loading).config, third=third, target=loading.target.spec).auxiliary


def _read_by_dflash(config: SpeculativeConfig, loading: Loading) -> tuple[int, ...]:
    spark = config.method == "dspark"
    return read_dflash(_head(config, loading).config, spark=spark, target=loading.target.spec).auxiliary


def _load_eagle(config: SpeculativeConfig, loading: Loading) -> EagleModel:
    logger.info("%s head %s", config.method, config.model)
    checkpoint = _head(config, loading)
    return load_eagle(
        checkpoint,
        checkpoint.config,
        third=config.method == "eagle3",
        target=loading.target,
        dtype=loading.dtype,
        max_len=loading.longest,
        seed=loading.args.seed,
    )


def _load_mtp(config: SpeculativeConfig, loading: Loading) -> MTPModel:
    args = loading.args
    if config.model not in (None, args.model) or config.revision not in (None, args.revision):
        raise ConfigError(
            f'speculative_config: method="mtp" drafts with a layer of the model\'s own checkpoint, {args.model}; leave model '
            "and revision out"
        )
    return load_mtp(
        open_checkpoint(args.model, revision=args.revision, load_format=args.load_format),
        target=loading.target,
        dtype=loading.dtype,
        max_len=loading.longest,
        seed=args.seed,
    )


def _load_dflash(config: SpeculativeConfig, loading: Loading) -> DFlashModel:
    logger.info("%s drafter %s", config.method, config.model)
    return load_dflash(
        _head(config, loading),
        spark=config.method == "dspark",
        target=loading.target,
        dtype=loading.dtype,
        max_len=loading.longest,
        seed=loading.args.seed,
    )


def _synthetic(real: Drafts, length: float) -> Drafts:
    """The same drafts, right as often as ``length`` says."""
    logger.warning(
        "SYNTHETIC ACCEPTANCE: rows bring %g tokens a step whatever the model says. For benchmarks only: what is generated "
        "is no text, and grammars will break",
        length,
    )

    def make(house: DraftHouse) -> Drafter:
        return SyntheticDrafter(house.arena, house.number, real.drafter(house), length, house.target.spec.vocab_size)

    return replace(real, drafter=make)
