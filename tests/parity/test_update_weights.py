"""Weights replaced while an engine is open: the tokens are those of an engine started with the new files."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from expert_zoo import QUANTISED, make_expert_model, quantise_folder
from family_zoo import draw_model
from hybrid_parity import stacked_and_each
from hybrid_zoo import make_hybrid_model
from local_host import LocalHostEngine
from model_zoo import make_model, save_tokenizer
from placement import engine_config
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from drift_sdk import (
    Engine,
    EngineClosed,
    EngineConfig,
    EnginePool,
    NGram,
    RequestError,
    Speculation,
    SyncEngine,
)
from drift_sdk.execution.eager import eager_executor
from drift_sdk.models import weight_update
from drift_sdk.models.weight_update import leaves
from drift_sdk.testing import scripted_engine

MODELS = {"llama": 1, "qwen2": 13, "qwen3": 19, "gemma3": 30, "granite": 32, "gemma4": 33}
"""Indices in the zoo: fused projections with biases, norms of heads, a tied head, norms after layers."""
Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def changed(tensors: Mapping[str, torch.Tensor], seed: int = 1) -> Tensors:
    """Other tensors of the same size: of matrices, rows and columns are drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape))
        for name, tensor in sorted(tensors.items())
    }


def moved(tensors: Mapping[str, torch.Tensor], seed: int = 2) -> Tensors:
    """Tensors a little apart from the given ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(tensors.items())
    }


def saved(folder: Path, tensors: Tensors) -> Path:
    """A copy of a model's folder with these tensors in place of its own."""
    target = folder.parent / f"{folder.name}-new"
    shutil.copytree(folder, target)
    for file in target.glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def config(**fields: Any) -> EngineConfig:
    return engine_config(**{"max_model_len": 128, "max_num_seqs": 1, **fields})


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 90) for _ in range(length)] for length in (1, 9, 40)]


def answers(engine: SyncEngine) -> list[tuple[int, ...]]:
    return [
        engine.generate(prompt, max_tokens=12, ignore_eos=True).result().token_ids for prompt in prompts()
    ]


def weights_of(engine: SyncEngine | Engine) -> list[torch.Tensor]:
    """Copies of all tensors of the weights in use."""
    owner = engine._engine if isinstance(engine, SyncEngine) else engine
    decoder = owner._driver._executor._decoder  # type: ignore[union-attr]
    found = [each if isinstance(each, torch.Tensor) else each.tensors() for each in leaves(decoder.weights)]
    flat = [tensor for each in found for tensor in ([each] if isinstance(each, torch.Tensor) else each)]
    return [tensor.clone() for tensor in flat]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def check(folder: Path, new: Tensors, **fields: Any) -> None:
    """All weights are the ones of an engine that is started with the new tensors, and so are the tokens."""
    with SyncEngine(saved(folder, new), config(**fields)) as engine:
        expected, wanted = answers(engine), weights_of(engine)
    with SyncEngine(folder, config(**fields)) as engine:
        before = answers(engine)
        assert not same(weights_of(engine), wanted)
        engine.update_weights(new)
        assert same(weights_of(engine), wanted)
        assert answers(engine) == expected != before


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_an_engine_with_the_new_files(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(MODELS[name], folder)
    check(folder, changed(tensors_of(folder)))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_vision", "qwen3_next"])
def test_models_with_recurrent_layers(family: str, tmp_path: Path) -> None:
    """Rows of their projections stand in another order than in files, and experts beside them."""
    folder = tmp_path / "model"
    make_hybrid_model(family, 3, folder)
    check(folder, moved(tensors_of(folder)))


def test_names_are_those_of_files_of_models_that_read_images_too(tmp_path: Path) -> None:
    """In errors as well."""
    make_hybrid_model("qwen3_5_vision", 3, tmp_path)
    norm, other = "model.language_model.norm.weight", "model.language_model.layers.9.mlp.up_proj.weight"
    old = tensors_of(tmp_path)[norm]
    with SyncEngine(tmp_path, config()) as engine:
        before = weights_of(engine)
        for given, words in (
            ({norm: old[1:]}, rf"tensors\['{norm}'\]: shape"),
            ({norm: old, other: old}, rf"tensors\['{other}'\]: no tensor of this model"),
            ({norm: old, "model.norm.weight": old}, f"{norm}.*, expected one of them"),
        ):
            with pytest.raises(RequestError, match=words):
                engine.update_weights(given)
        assert same(weights_of(engine), before)
        engine.update_weights({norm: old + 1})
        assert not same(weights_of(engine), before)


def test_names_are_those_of_files_without_a_head(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(MODELS["qwen3"], folder)
    named = {name.removeprefix("model."): tensor for name, tensor in tensors_of(folder).items()}
    assert "embed_tokens.weight" in named
    check(saved(folder, named), changed(named))


def test_models_with_latent_attention(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    sizes = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
    draw_model("glm4_moe_lite", 9, **sizes).save_pretrained(folder)
    save_tokenizer(folder, 160)
    check(folder, moved(tensors_of(folder)))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_mixtures_of_experts(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_expert_model(name, folder)
    check(folder, moved(tensors_of(folder)))


@pytest.mark.parametrize(
    "parts", [("0.up_proj.weight", "1.gate_proj.weight", "2.down_proj.weight"), ("down_proj", "gate_up_proj")]
)
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_moe"])
def test_a_tensor_of_experts_alone(family: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """In the layout of the files of either family, whichever the folder has."""
    folder, prefix = tmp_path / "model", "model.layers.0.mlp.experts"
    if family == "qwen3_moe":
        make_expert_model(family, folder)
    else:
        make_hybrid_model(family, 3, folder)
    names = [f"{prefix}.{part}" for part in parts]
    layout = stacked_and_each(tensors_of(folder))[len(parts) == 3]
    new = moved({name: layout[name] for name in names})
    with SyncEngine(saved(folder, layout | new), config()) as engine:
        wanted = weights_of(engine)
    with SyncEngine(folder, config()) as engine:
        assert not same(weights_of(engine), wanted)
        for name in names:
            engine.update_weights({name: new[name]})
        assert same(weights_of(engine), wanted)


@pytest.mark.parametrize("is_each", [True, False])
def test_quantised_experts_in_another_layout_are_refused_by_name(is_each: bool, tmp_path: Path) -> None:
    """Those with a tensor for each matrix are quantised one by one; those in one tensor are not."""
    make_hybrid_model("qwen3_5_moe", 3, tmp_path / "model")
    layouts = stacked_and_each(tensors_of(tmp_path / "model"))
    own, other = layouts[is_each], layouts[not is_each]
    with SyncEngine(saved(tmp_path / "model", own), config(weights="fp8")) as engine:
        before, tokens = weights_of(engine), answers(engine)
        with pytest.raises(RequestError, match=r"layers\.0\..*\.experts\..*, as in the model's files"):
            engine.update_weights(other)
        assert same(weights_of(engine), before) and answers(engine) == tokens
        engine.update_weights(own)
        assert same(weights_of(engine), before)


def test_experts_in_mxfp4_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "mxfp4"
    quantise_folder(make_expert_model(QUANTISED, tmp_path), tmp_path, folder)
    with SyncEngine(folder, config()) as engine:
        with pytest.raises(RequestError, match="experts are not stored in MXFP4"):
            engine.update_weights({"model.norm.weight": torch.ones(4)})


@pytest.mark.parametrize("form", ["fp8", "int4", "nvfp4"])
def test_weights_that_are_quantised_when_they_are_loaded(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(1, folder)
    check(folder, changed(tensors_of(folder)), weights=form)


def test_one_tensor_of_a_fused_matrix(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(13, folder)
    old = tensors_of(folder)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.bias"):
        part = changed({name: old[name]})
        with SyncEngine(saved(folder, old | part), config()) as engine:
            wanted = weights_of(engine)
        shutil.rmtree(folder.parent / f"{folder.name}-new")
        with SyncEngine(folder, config()) as engine:
            engine.update_weights(part)
            assert same(weights_of(engine), wanted)


def test_prefixes_of_the_old_weights_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(1, folder)
    new = changed(tensors_of(folder))
    prompt = prompts()[-1]
    with SyncEngine(saved(folder, new), config()) as engine:
        expected = engine.generate(prompt, max_tokens=9, ignore_eos=True).result().token_ids
    with SyncEngine(folder, config()) as engine:
        engine.generate(prompt, max_tokens=1).result()
        assert engine.generate(prompt, max_tokens=1).result().usage.cached_tokens > 0
        engine.update_weights(new)
        found = engine.generate(prompt, max_tokens=9, ignore_eos=True).result()
        assert found.usage.cached_tokens == 0 and found.token_ids == expected


@pytest.mark.parametrize("speculation", [None, Speculation(draft=NGram(min_length=1), adaptive=False)])
def test_requests_go_on_with_the_new_weights(speculation: Speculation | None, tmp_path: Path) -> None:
    """What follows is what the new weights generate behind the tokens so far."""
    folder = tmp_path / "model"
    make_model(1, folder)
    new = changed(tensors_of(folder))
    prompt = [5, 6, 7] * 8
    options = {"max_tokens": 90, "ignore_eos": True}

    async def main() -> None:
        async with Engine(folder, config(speculation=speculation)) as engine:
            plain = (await engine.generate(prompt, **options)).token_ids
            stream = engine.generate(prompt, **options)
            waiting = engine.generate(prompt, **options)
            num_seen = 0
            async for chunk in stream:
                num_seen += len(chunk.token_ids)
                if num_seen >= 5:
                    break
            await engine.pause()
            updating = anyio.Event()

            async def update() -> None:
                await engine.update_weights(new)
                updating.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(update)
                await engine.resume()
            assert updating.is_set()
            found, other = (await stream).token_ids, (await waiting).token_ids
            assert engine.stats().num_preemptions > 0
        async with Engine(saved(folder, new), config(speculation=speculation)) as engine:
            assert other == (await engine.generate(prompt, **options)).token_ids
            kept = next(n for n in range(91) if found[:n] != plain[:n]) - 1
            assert kept >= 5
            rest = await engine.generate(
                [*prompt, *found[:kept]], max_tokens=len(found) - kept, ignore_eos=True
            )
            assert found[kept:] == rest.token_ids

    anyio.run(main)


class Unreadable(dict[str, torch.Tensor]):
    def __getitem__(self, name: str) -> torch.Tensor:
        raise ValueError("no such place")


class Endless(Mapping[str, torch.Tensor]):
    """Says that it has one item."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.ones(3)

    def __iter__(self) -> Iterator[str]:
        return map(str, count())

    def __len__(self) -> int:
        return 1


class Wrapper(torch.Tensor):
    """A tensor that computes by other ones, as distributed tensors do."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def without_storage(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def test_a_wrong_tensor_changes_nothing(tmp_path: Path) -> None:
    make_model(13, tmp_path)
    old = tensors_of(tmp_path)
    new = changed(old)
    up, norm = "model.layers.2.mlp.up_proj.weight", "model.norm.weight"
    nan = new[norm].clone()
    nan[3] = float("nan")
    wrong: list[tuple[Any, str]] = [
        ({"model.layers.3.mlp.up_proj.weight": new[up]}, r"layers.3.mlp.up_proj.weight'\]: .* of this model"),
        ({f"base_model.{up}": new[up]}, f"no tensor of this model: expected names such as '{up}'"),
        ({"layers.2.mlp.up_proj.weight": new[up]}, f"no tensor of this model: expected names such as '{up}'"),
        ({up: new[up].T.contiguous()}, rf"{up}'\]: shape \[48, 80\]: expected shape \[80, 48\]"),
        ({up: new[up].to(torch.int32)}, rf"{up}'\]: stored as torch.int32: expected float32"),
        ({norm: nan}, rf"{norm}'\]: not finite: expected finite numbers"),
        ({up: new[up].to("meta")}, rf"{up}'\]: .* device 'meta': expected a dense tensor"),
        ({up: new[up].to_sparse()}, rf"{up}'\]: .*sparse_coo.*: expected a dense tensor"),
        ({up: torch.Tensor._make_subclass(Wrapper, new[up])}, rf"{up}'\]: of Wrapper.*: expected a dense"),
        ({up: without_storage(new[up])}, "tensors, all of which can be read"),
        (Unreadable(new), r"tensors that can be read \(ValueError"),
        (Endless(), r"tensors that can be read \(ValueError\('more than 1 items'\)"),
        ({up: new[up].numpy()}, "names, each with a tensor of torch"),
        ({5: new[up]}, "names, each with a tensor of torch"),
        ({}, "not empty"),
        ([new[up]], "a mapping of names to tensors"),
    ]
    shape = list(new[up].shape)
    with SyncEngine(tmp_path, config()) as engine:
        before, tokens = weights_of(engine), answers(engine)
        for given, words in wrong:
            words = words.replace(r"\[48, 80\]", rf"\[{shape[1]}, {shape[0]}\]")
            words = words.replace(r"\[80, 48\]", rf"\[{shape[0]}, {shape[1]}\]")
            every = new | given if type(given) is dict and given else given
            with pytest.raises(RequestError, match=words):
                engine.update_weights(every)
            assert same(weights_of(engine), before)
        assert answers(engine) == tokens
        engine.update_weights(new)
        assert not same(weights_of(engine), before)


def test_a_part_of_a_quantised_layer_is_refused_by_name(tmp_path: Path) -> None:
    make_model(1, tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    with SyncEngine(tmp_path, config(weights="int4")) as engine:
        before = weights_of(engine)
        with pytest.raises(RequestError, match=r"layers.1.*missing: expected the other tensors of layer 1"):
            engine.update_weights(changed({name: tensors_of(tmp_path)[name]}))
        assert same(weights_of(engine), before)


def test_numbers_that_overflow_when_they_are_quantised_change_nothing(tmp_path: Path) -> None:
    make_model(1, tmp_path)
    new, name = tensors_of(tmp_path), "model.layers.1.mlp.gate_proj.weight"
    new[name][:, 0] = torch.finfo(torch.float32).max
    with SyncEngine(tmp_path, config(weights="int4")) as engine:
        before = weights_of(engine)
        with pytest.raises(RequestError, match=f"^tensors: .*{name} has NaN, infinity or numbers too large"):
            engine.update_weights(new)
        assert same(weights_of(engine), before) and engine.is_open


def test_a_tied_head_has_to_be_the_embedding(tmp_path: Path) -> None:
    make_model(19, tmp_path)
    new = changed(tensors_of(tmp_path))
    embedding = new["model.embed_tokens.weight"]
    with SyncEngine(tmp_path, config()) as engine:
        with pytest.raises(RequestError, match="lm_head.weight'.*expected model.embed_tokens.weight"):
            engine.update_weights(new | {"lm_head.weight": embedding + 1})
        engine.update_weights(new | {"lm_head.weight": embedding.clone()})
        tokens = answers(engine)
        engine.update_weights(new)
        assert answers(engine) == tokens


def test_engines_that_cannot_refuse_by_name(tmp_path: Path) -> None:
    make_model(1, tmp_path)
    new = changed(tensors_of(tmp_path))

    async def main() -> None:
        async with scripted_engine("a") as engine:
            with pytest.raises(RequestError, match="this one has the executor 'scripted'"):
                await engine.update_weights(new)
            assert (await engine.generate("b")).text == "a"
        async with Engine(tmp_path, config()) as engine:
            await engine.sleep()
            with pytest.raises(RequestError, match=r"this one is asleep, until wake\(\)"):
                await engine.update_weights(new)
        async with LocalHostEngine(lambda: scripted_engine("a")) as remote:
            with pytest.raises(RequestError, match="expected an engine of this process"):
                await remote.update_weights(new)

    anyio.run(main)


def test_a_pool_updates_its_replicas(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(1, folder)
    new = changed(tensors_of(folder))

    async def main() -> None:
        engines = [Engine(folder, config()), Engine(folder, config())]
        async with EnginePool(engines) as pool:
            before = weights_of(engines[0])
            await pool.update_weights(new)
            assert same(*map(weights_of, engines)) and not same(before, weights_of(engines[0]))
            found = (await pool.generate([5, 6], max_tokens=9, ignore_eos=True)).token_ids
        async with Engine(saved(folder, new), config()) as engine:
            assert found == (await engine.generate([5, 6], max_tokens=9, ignore_eos=True)).token_ids

    anyio.run(main)


def test_updates_of_a_pool_from_two_loops_reach_all_replicas_in_one_order(tmp_path: Path) -> None:
    make_model(1, tmp_path)
    one, other = (moved(tensors_of(tmp_path), seed) for seed in (2, 3))

    async def main() -> None:
        engines = [Engine(tmp_path, config()) for _ in range(2)]
        async with EnginePool(engines) as pool:
            has_begun, may_go_on = anyio.Event(), threading.Event()
            update = engines[0].update_weights

            async def waits(tensors: Mapping[str, Any]) -> None:
                await update(tensors)
                if tensors is one:
                    has_begun.set()
                    await anyio.to_thread.run_sync(may_go_on.wait)

            engines[0].update_weights = waits  # type: ignore[method-assign]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.update_weights, one)
                await has_begun.wait()
                tasks.start_soon(anyio.to_thread.run_sync, anyio.run, pool.update_weights, other)
                await anyio.sleep(0.2)
                version = engines[1].stats().weights_version
                may_go_on.set()
            assert version == 0
            assert same(*map(weights_of, engines)) and engines[1].stats().weights_version == 2

    anyio.run(main)


@pytest.mark.parametrize("is_native", [False, True])
def test_a_cancelled_update_of_a_pool_reaches_all_replicas(is_native: bool, tmp_path: Path) -> None:
    make_model(1, tmp_path)
    new = changed(tensors_of(tmp_path))

    async def main() -> None:
        engines = [Engine(tmp_path, config()) for _ in range(3)]
        async with EnginePool(engines) as pool:
            if is_native:
                task = asyncio.create_task(pool.update_weights(new))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with anyio.move_on_after(0) as scope:
                    await pool.update_weights(new)
                assert scope.cancel_called
            assert [engine.stats().weights_version for engine in engines] == [1, 1, 1]
            await pool.update_weights(new)

    anyio.run(main)


def test_a_replica_that_closes_during_an_update_is_left_out(tmp_path: Path) -> None:
    make_model(1, tmp_path)
    new = changed(tensors_of(tmp_path))

    async def main() -> None:
        engines = [Engine(tmp_path, config()) for _ in range(3)]
        async with EnginePool(engines) as pool:
            update = engines[1].update_weights

            async def closes(tensors: Mapping[str, Any]) -> None:
                await engines[1].aclose()
                await update(tensors)

            engines[1].update_weights = closes  # type: ignore[method-assign]
            await pool.update_weights(new)
            assert engines[0].stats().weights_version == engines[2].stats().weights_version == 1
            assert same(weights_of(engines[0]), weights_of(engines[2]))
        with pytest.raises(EngineClosed):
            await pool.update_weights(new)

    anyio.run(main)


class OperationNames(TorchDispatchMode):
    """Notes the names of operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(function.overloadpacket._qualified_op_name)
        return function(*args, **kwargs or {})


VIEWS = {"aten::view", "aten::slice", "aten::detach", "aten::as_strided"}


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("form", ["expanded", "fp8"])
def test_copies_need_no_memory(
    form: str, is_far: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_far: as between devices, for tensors of another dtype and of another layout."""
    folder = tmp_path / "model"
    make_model(1, folder)
    new = changed(tensors_of(folder))
    with SyncEngine(saved(folder, new), config(weights=form)) as engine:
        wanted = weights_of(engine)
    names, run = OperationNames(), weight_update.Copies.run
    buffers: list[int] = []

    def noted(self: weight_update.Copies) -> None:
        buffers.append(sum(each.numel() for each in self._buffers.values()))
        with names:
            run(self)

    monkeypatch.setattr(weight_update.Copies, "run", noted)
    if is_far:
        monkeypatch.setattr(weight_update, "is_between_devices", lambda target, source: True)
    given = {
        name: tensor.double().T.contiguous().T if tensor.ndim == 2 else tensor.double()
        for name, tensor in new.items()
    }
    with SyncEngine(folder, config(weights=form)) as engine:
        engine.update_weights(given)
        assert same(weights_of(engine), wanted)
    assert "aten::copy_" in names.found and names.found <= {"aten::copy_", *VIEWS}
    largest = max(tensor.numel() * 4 for tensor in new.values())
    assert buffers == [largest if is_far else 0]


@pytest.mark.parametrize("form", ["expanded", "int4"])
@pytest.mark.parametrize("number", [0, 1])
def test_too_little_memory_changes_nothing(
    number: int, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While layers are loaded, and for the buffers. The engine serves as before, and takes the weights when
    there is memory."""
    make_model(1, tmp_path)
    new = changed(tensors_of(tmp_path))
    calls = 0
    usual = weight_update.loaded

    def loaded(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return usual(*arguments)

    def no_buffers(self: weight_update.Copies, pairs: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8")

    with SyncEngine(tmp_path, config(weights=form)) as engine:
        before, tokens = weights_of(engine), answers(engine)
        with monkeypatch.context() as patch:
            if number == 0 and form == "int4":
                patch.setattr(weight_update, "loaded", loaded)
            else:
                patch.setattr(weight_update.Copies, "__init__", no_buffers)
            with pytest.raises(RequestError, match="more free memory: nothing has changed") as caught:
                engine.update_weights(new)
            assert caught.value.field == "tensors"
        assert same(weights_of(engine), before) and answers(engine) == tokens
        assert engine.stats().weights_version == 0
        engine.update_weights(new)
        assert answers(engine) != tokens and engine.stats().weights_version == 1


def test_versions_of_weights_are_reported(tmp_path: Path) -> None:
    make_model(1, tmp_path)
    old = tensors_of(tmp_path)
    new = changed(old)

    async def main() -> None:
        async with Engine(tmp_path, config(max_num_seqs=2)) as engine:
            short = await engine.generate([5, 6], max_tokens=2, ignore_eos=True)
            running = engine.generate([5, 6], max_tokens=60, ignore_eos=True)
            async for _ in running:
                break
            await engine.update_weights(new)
            later = await engine.generate([5, 6], max_tokens=2, ignore_eos=True)
            assert short.weights_versions == (0, 0) and later.weights_versions == (1, 1)
            assert (await running).weights_versions == (0, 1)
            assert engine.stats().weights_version == 1
            await engine.sleep()
            await engine.wake()  # with the weights of the files
            last = await engine.generate([5, 6], max_tokens=2, ignore_eos=True)
            assert last.token_ids == short.token_ids and last.weights_versions == (2, 2)
            assert "drift_weights_version 2.0" in engine.metrics_text()

    anyio.run(main)


def test_a_pool_whose_replicas_differ_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of which the second replica has no memory for. Every answer is of one set of weights."""
    folder = tmp_path / "model"
    make_model(1, folder)
    old = tensors_of(folder)
    new = changed(old)
    usual = weight_update.update_weights

    async def main() -> None:
        engines = [Engine(folder, config()) for _ in range(3)]
        async with EnginePool(engines) as pool:
            [before] = {(await engine.generate([5, 6], max_tokens=9)).token_ids for engine in engines}

            def refuses(decoder: Any, *rest: Any) -> None:
                if decoder is engines[1]._driver._executor._decoder:  # type: ignore[union-attr]
                    raise weight_update.no_room(MemoryError())
                usual(decoder, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(eager_executor, "update_weights", refuses)
                words = "replica 1, after 1 with the new weights: tensors: expected fewer at a time"
                with pytest.raises(RequestError, match=words):
                    await pool.update_weights(new)
            versions = [each.engine.weights_version for each in pool.replicas() if each.engine is not None]
            assert versions == [1, 0, 0] and pool.stats().weights_version == 0
            by_version: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
            for stream in [pool.generate([5, 6], max_tokens=9) for _ in range(12)]:
                found = await stream
                assert found.weights_versions[0] == found.weights_versions[1]
                by_version[found.weights_versions[0]].add(found.token_ids)
            assert by_version[0] == {before} and len(by_version[1]) == 1 and before not in by_version[1]
            await pool.update_weights(new)
            versions = [each.engine.weights_version for each in pool.replicas() if each.engine is not None]
            assert versions == [2, 1, 1] and pool.stats().weights_version == 1

    anyio.run(main)


def test_a_paused_pool_is_updated_as_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(1, folder)
    new = changed(tensors_of(folder))

    async def main() -> None:
        async with EnginePool([Engine(folder, config()) for _ in range(2)]) as pool:
            await pool.pause()
            streams = [pool.generate([5, 6], max_tokens=9, ignore_eos=True) for _ in range(8)]
            await pool.update_weights(new)
            await pool.resume()
            found = [await stream for stream in streams]
            assert {each.weights_versions for each in found} == {(1, 1)}
            assert len({each.token_ids for each in found}) == 1

    anyio.run(main)
