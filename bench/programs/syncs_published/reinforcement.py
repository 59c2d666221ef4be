"""Reinforcement learning and planning. A line that waits by documentation ends in ``# waits``; no other line waits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import nn


def proximal_policy_over_a_numpy_world(device: str) -> Any:
    policy, value = nn.Linear(4, 3).to(device), nn.Linear(4, 1).to(device)  # waits
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-3, eps=1e-5)
    states, actions = torch.zeros(6, 2, 4, device=device), torch.zeros(6, 2, dtype=torch.long, device=device)
    chances, rewards, values = (torch.zeros(6, 2, device=device) for _ in range(3))
    world = np.random.randn(2, 4).astype(np.float32)
    for step in range(6):
        states[step] = torch.tensor(world, device=device)  # waits
        with torch.no_grad():
            logits = policy(states[step])
            noise = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
            actions[step] = (logits - (-noise.log()).log()).argmax(-1)
            chances[step] = logits.log_softmax(-1).gather(-1, actions[step, :, None])[:, 0]
            values[step] = value(states[step])[:, 0]
        chosen = actions[step].cpu().numpy()  # waits
        world = world * 0.9 + chosen[:, None].astype(np.float32)
        rewards[step] = torch.from_numpy(world.sum(1)).to(device)  # waits
    advantages, running = torch.zeros_like(rewards), torch.zeros(2, device=device)
    for step in reversed(range(5)):
        delta = rewards[step] + 0.99 * values[step + 1] - values[step]
        running = delta + 0.99 * 0.95 * running
        advantages[step] = running
    flat, old, targets = states.flatten(0, 1), chances.flatten(), (advantages + values).flatten()
    gains, divergence = advantages.flatten(), torch.zeros((), device=device)
    for rows in np.array_split(np.random.permutation(12), 3):
        new = policy(flat[rows]).log_softmax(-1)  # waits
        index = torch.from_numpy(rows).to(device)  # waits
        ratio = (new.gather(-1, actions.flatten()[index][:, None])[:, 0] - old[index]).exp()
        gain = gains[index]
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        loss = 0.5 * F.mse_loss(value(flat[index])[:, 0], targets[index]) - clipped.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        divergence = ((ratio - 1) - ratio.log()).mean().detach()
    return {"divergence": divergence.item(), "weights": policy.weight}  # waits


def value_learning_from_a_host_memory(device: str) -> Any:
    network, target = nn.Linear(3, 2, device=device), nn.Linear(3, 2, device=device)
    target.load_state_dict(network.state_dict())
    optimizer, memory = torch.optim.SGD(network.parameters(), lr=0.1), list[tuple[Any, ...]]()
    state, chosen = np.ones(3, dtype=np.float32), []
    for step in range(8):
        with torch.no_grad():
            answer = network(torch.from_numpy(state).to(device))  # waits
        action = random.randrange(2) if step < 2 else int(answer.argmax())  # waits
        chosen.append(action)
        following = state * 0.5 + action
        memory.append((state, action, float(following.sum()), following))
        state = following
        if len(memory) < 4:
            continue
        states, actions, rewards, nexts = zip(*random.sample(memory, 4))
        batch = torch.as_tensor(np.stack(states), device=device)  # waits
        taken = torch.tensor(actions, device=device)  # waits
        earned = torch.tensor(rewards, device=device)  # waits
        with torch.no_grad():
            bootstrap = target(torch.as_tensor(np.stack(nexts), device=device)).max(1).values  # waits
        estimate = network(batch).gather(1, taken.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(estimate, earned + 0.9 * bootstrap)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return chosen, network.bias


def soft_actor_critic_with_tuned_temperature(device: str) -> Any:
    actor, first, second = (nn.Linear(4, n, device=device) for n in (4, 1, 1))
    slow = nn.Linear(4, 1, device=device)
    logarithm = torch.zeros(1, requires_grad=True, device=device)
    tuner = torch.optim.Adam([logarithm], lr=0.01)
    state = torch.randn(5, 2, device=device)
    temperature = logarithm.exp().item()  # waits
    for _ in range(2):
        mean, spread = actor(F.pad(state, (0, 2))).chunk(2, -1)
        spread = spread.tanh().mul(2).exp()
        raw = mean + spread * torch.randn_like(mean)
        action = raw.tanh()
        chance = (-0.5 * ((raw - mean) / spread) ** 2 - spread.log() - torch.log(1 - action**2 + 1e-6)).sum(-1)
        pair = torch.cat([state, action], -1)
        worth = torch.min(first(pair), second(pair))[:, 0]
        (temperature * chance - worth).mean().backward()
        tuner.zero_grad()
        (-logarithm.exp() * (chance.detach() - 2)).mean().backward()
        tuner.step()
        temperature = logarithm.exp().item()  # waits
        with torch.no_grad():
            for lag, lead in zip(slow.parameters(), first.parameters()):
                lag.mul_(0.995).add_(lead, alpha=0.005)
    return temperature, slow.weight, actor.weight.grad


def policy_gradient_with_checked_distributions(device: str) -> Any:
    policy, rewards = nn.Linear(3, 4, device=device), []
    state, chances = torch.ones(2, 3, device=device), []
    for _ in range(3):
        choice = td.Categorical(logits=policy(state))  # waits
        action = choice.sample()
        chances.append(choice.log_prob(action))  # waits
        rewards.append((action == 1).float())
        state = state + action[:, None]
    total, returns = torch.zeros(2, device=device), []
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    worth = torch.stack(returns)
    worth = (worth - worth.mean()) / (worth.std() + 1e-6)
    loss = -(torch.stack(chances) * worth).sum()
    loss.backward()
    return policy.weight.grad


def policy_gradient_without_checks(device: str) -> Any:
    policy, state = nn.Linear(3, 4, device=device), torch.ones(2, 3, device=device)
    choice = td.Categorical(logits=policy(state), validate_args=False)
    action = choice.sample()
    loss = -(choice.log_prob(action) * (action == 1)).sum() - 0.01 * choice.entropy().mean()
    loss.backward()
    return policy.weight.grad


def memory_drawn_by_priority(device: str) -> Any:
    priorities, stored = torch.rand(16, device=device), torch.randn(16, 3, device=device)
    sums = priorities.pow(0.6).cumsum(0)
    width = sums[-1] / 4
    points = (torch.arange(4, device=device) + torch.rand(4, device=device)) * width
    rows = torch.searchsorted(sums, points).clamp(max=15)
    weights = (16 * priorities[rows] / sums[-1]).pow(-0.4)
    weights = weights / weights.max()
    errors = stored[rows].norm(dim=-1)
    priorities.index_copy_(0, rows[:1], errors[:1])
    return weights, priorities


def memory_drawn_by_priority_with_a_host_sum(device: str) -> Any:
    priorities = torch.rand(16, device=device)
    total = priorities.sum().item()  # waits
    points = [random.uniform(total * i / 4, total * (i + 1) / 4) for i in range(4)]
    rows = torch.searchsorted(priorities.cumsum(0), torch.tensor(points, device=device))  # waits
    return priorities[rows.clamp(max=15)]


def recurrent_actor_whose_episodes_end(device: str) -> Any:
    cell, reset = nn.LSTMCell(3, 4, device=device), 0
    hidden, memory = torch.zeros(2, 4, device=device), torch.zeros(2, 4, device=device)
    for step in range(4):
        hidden, memory = cell(torch.full((2, 3), float(step), device=device), (hidden, memory))
        done = hidden[:, 0] > 0.05
        if done.any():  # waits
            reset += 1
        keep = (~done).float().unsqueeze(1)
        hidden, memory = hidden * keep, memory * keep
    return reset, hidden


def tree_search_with_batched_leaves(device: str) -> Any:
    network, visits = nn.Linear(3, 5, device=device), dict[int, float]()
    leaves = [np.full(3, float(number), dtype=np.float32) for number in range(4)]
    batch = torch.stack([torch.from_numpy(leaf) for leaf in leaves]).to(device)  # waits
    with torch.inference_mode():
        priors, worths = network(batch).split([4, 1], dim=-1)
        priors = priors.softmax(-1).tolist()  # waits
        worths = worths.squeeze(-1).cpu().numpy()  # waits
    for number, (prior, worth) in enumerate(zip(priors, worths)):
        visits[number] = float(worth) + max(prior)
    return visits


def plan_by_cross_entropy(device: str) -> Any:
    mean, spread = torch.zeros(5, 2, device=device), torch.ones(5, 2, device=device)
    goal = torch.full((2,), 0.3, device=device)
    for _ in range(3):
        plans = mean + spread * torch.randn(32, 5, 2, device=device)
        costs = ((plans.cumsum(1) - goal) ** 2).sum((1, 2))
        elites = plans[costs.topk(4, largest=False).indices]
        mean, spread = elites.mean(0), elites.std(0) + 1e-3
    return mean[0].cpu()  # waits


def evolution_by_ranks(device: str) -> Any:
    weights = torch.zeros(6, device=device)
    for _ in range(2):
        half = torch.randn(4, 6, device=device)
        noise = torch.cat([half, -half])
        fitness = -((weights + 0.1 * noise - 1) ** 2).sum(1)
        ranks = fitness.argsort().argsort().float() / 7 - 0.5
        weights = weights + 0.05 / (8 * 0.1) * ranks @ noise
    return weights


def evolution_scored_by_the_host(device: str) -> Any:
    weights, noise = torch.zeros(6, device=device), torch.randn(4, 6, device=device)
    members = (weights + noise).cpu().numpy()  # waits
    scores = [float(-(member**2).sum()) for member in members]
    fitness = torch.tensor(scores, device=device)  # waits
    return weights + (fitness - fitness.mean()) @ noise


def returns_as_tokens(device: str) -> Any:
    lengths = torch.tensor([2, 4])
    padding = torch.arange(4) >= lengths[:, None]
    mask = padding.to(device, non_blocking=True)  # waits
    table = nn.Embedding(8, 6, device=device)
    states, steps = torch.randn(2, 4, 6, device=device), torch.arange(4, device=device).expand(2, 4)
    tokens = states + table(steps)
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, device=device)
    seen = layer(tokens, src_key_padding_mask=mask)
    loss = ((seen - states) ** 2).mean(-1).masked_fill(mask, 0.0).sum() / (~mask).sum()
    loss.backward()
    return loss


def values_as_distributions(device: str) -> Any:
    support = torch.linspace(-1, 1, 11, device=device)
    chances = torch.rand(3, 11, device=device).softmax(-1)
    rewards, done = torch.rand(3, 1, device=device), torch.zeros(3, 1, device=device)
    place = (rewards + 0.9 * (1 - done) * support).clamp(-1, 1).add(1).div(0.2)
    low, high = place.floor().long(), place.ceil().long()
    low = torch.where((high > 0) & (low == high), low - 1, low)
    made = torch.zeros(3, 11, device=device)
    made.scatter_add_(1, low, chances * (high - place))
    made.scatter_add_(1, high.clamp(max=10), chances * (place - low))
    return made


def latent_world_with_straight_through_codes(device: str) -> Any:
    prior, posterior = nn.Linear(4, 6, device=device), nn.Linear(4, 6, device=device)
    state = torch.randn(2, 4, device=device)
    left, right = prior(state).view(2, 2, 3), posterior(state).view(2, 2, 3)
    chances = right.softmax(-1)
    code = F.one_hot(torch.multinomial(chances.detach().flatten(0, 1), 1)[:, 0], 3).view(2, 2, 3)
    sample = code + chances - chances.detach()
    gap = (chances * (right.log_softmax(-1) - left.log_softmax(-1))).sum(-1)
    loss = gap.clamp(min=0.1).mean() + (sample.flatten(1).sum(1) ** 2).mean()
    loss.backward()
    return prior.weight.grad, posterior.weight.grad
