"""A plain training loop, and the same over a pipeline of two ranks: what differs is marked with <-.

python examples/own_loop.py     or     torchrun --nproc-per-node=2 examples/own_loop.py"""

import torch
from torch import nn

import engine


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)).double()


def train(pipelined):
    net, loss_of, losses = model(), nn.CrossEntropyLoss(), []
    if pipelined:
        net = engine.Pipeline(net, loss_of, schedule="1f1b", microbatches=4)  # <-
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for seed in range(10):
        data = torch.Generator().manual_seed(seed)
        x, y = torch.randn(16, 8, generator=data).double(), torch.randint(3, (16,), generator=data)
        if pipelined:
            loss = net.step((x, y))  # <-
        else:
            loss = loss_of(net(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = train(True) if engine.size() > 1 else engine.run_threads(2, train, True)[0]  # <-
    for plain, piped in zip(train(False), found, strict=True):
        if engine.rank() == 0:
            print(f"plain {plain:.12f}   pipeline {piped:.12f}   difference {abs(plain - piped):.1e}")
