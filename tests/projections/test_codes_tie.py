"""One book of codes whatever is done to a model: optimiser, averages, files, first weights, DDP and FSDP2."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from regard.lab.tasks.weights import redraw
from regard.lab.train.optimizer import param_groups
from regard.mixers.softmax import Softmax
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.projections.sne import FSNE

DESK = "vit_desk(size=(16, 24), dim=16, depth=2, heads=2)"
KEY = "regard_shared.0.weight"


def build(tied=True):
    torch.manual_seed(0)
    model = create_model(DESK, Softmax(projection=FSNE(code=4, tied=tied))).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def images(number=4):
    return torch.randn(number, 3, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tied(model):
    return all(block.attn.regard.qkv.codebook is model.regard_shared[0] for block in model.blocks)


@pytest.mark.parametrize("shared", [True, False])
def test_codes_have_no_weight_decay(shared):
    model = build(shared)
    decayed, spared = sorted(param_groups(model, 0.05), key=lambda group: -group["weight_decay"])
    codes = [value for name, value in model.named_parameters() if name == KEY or name.endswith("codes.weight")]
    assert len(codes) == (1 if shared else 2)
    assert {id(value) for value in codes} <= {id(value) for value in spared["params"]}
    assert id(model.blocks[0].attn.regard.qkv.weight1) in {id(value) for value in decayed["params"]}
    assert {name for name in model.no_weight_decay() if "codes" in name or "shared" in name} == {
        name for name, value in model.named_parameters() if any(value is code for code in codes)
    }


def test_an_average_has_its_own_book_and_keeps_the_tie():
    model = build()
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        model.regard_shared[0].weight.add_(2.0)
    average.update_parameters(model)
    assert tied(average.module)
    expected = model.regard_shared[0].weight - 1.0
    assert torch.allclose(average.module.blocks[1].attn.regard.qkv.codebook.weight, expected)


def test_safetensors_and_folders_hold_the_codes_once(tmp_path):
    model = build().eval()
    save_file(model.state_dict(), tmp_path / "state.safetensors")  # refuses tensors that share memory
    assert [key for key in load_file(tmp_path / "state.safetensors") if "code" in key or "shared" in key] == [KEY]
    back = load(save(model, tmp_path / "model"))
    assert tied(back)
    assert torch.equal(back(images()), model(images()))


@pytest.mark.parametrize("init", ["zero", "fan_in"])
def test_first_weights_of_shared_codes_come_from_the_seed(init):
    """The same seed draws the same codes whatever was drawn before, another seed others."""
    drawn = []
    for seed in (3, 3, 4):
        model = create_model(DESK, Softmax(projection=FSNE(code=4)))
        redraw(model, seed, init)
        drawn.append(model.regard_shared[0].weight.detach().clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert 0.4 < torch.stack(drawn).std() < 1.6


def test_first_weights_of_linear_rows_do_not_depend_on_the_codes():
    """Rows of a study share what they can: the output layers of a model with codes are those of one without."""
    models = [create_model(DESK, Softmax(projection=p)) for p in (FSNE(code=4), FSNE(code=4, tied=False))]
    for model in models:
        redraw(model, 0, "fan_in")
    a, b = (model.blocks[1].attn.regard.proj.weight for model in models)
    assert torch.equal(a, b)
    own = models[1].blocks
    assert not torch.equal(own[0].attn.regard.qkv.codes.weight, own[1].attn.regard.qkv.codes.weight)


def train(model, batch):
    """Two steps of gradient descent."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(batch).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()


def train_half(rank, port, folder, sharded):
    """One of two processes, each with half of the images; the first writes the weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = build()
    if sharded:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for block in (*model.blocks, model):  # the root owns the codes
            fully_shard(block, mesh=mesh)
    train(model if sharded else nn.parallel.DistributedDataParallel(model), images()[2 * rank : 2 * rank + 2])
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save({"state": state, "tied": tied(model)}, Path(folder) / "trained.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_train_as_one_and_keep_one_book(sharded, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train_half, (port, str(tmp_path), sharded), nprocs=2)
    found = torch.load(tmp_path / "trained.pt", weights_only=False)
    assert found["tied"]
    model = build()
    train(model, images())
    expected = model.state_dict()
    assert set(found["state"]) == set(expected)
    assert not torch.allclose(expected[KEY], build().state_dict()[KEY], atol=1e-4)
    for name, value in expected.items():
        assert torch.allclose(found["state"][name], value, rtol=1e-8, atol=1e-10), name
