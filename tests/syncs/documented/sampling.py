"""Sampling: language, images, actions, distributions. The first word of each docstring is the label."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributions as td
import torch.nn.functional as F


def nucleus_loop_until_all_stop(device: str) -> Iterator[None]:
    """Waits: each step asks whether every row has stopped."""
    table, ids = torch.randn(16, 16, device=device), torch.zeros(2, dtype=torch.long, device=device)
    done = torch.zeros(2, dtype=torch.bool, device=device)
    yield
    for _ in range(3):
        probs, order = F.softmax(table[ids], -1).sort(descending=True)
        probs = probs.masked_fill(probs.cumsum(-1) - probs > 0.9, 0.0)
        noise = torch.empty_like(probs).exponential_()
        ids = order.gather(-1, (probs / noise).argmax(-1, keepdim=True))[:, 0]
        done |= ids == 0
        if done.all():
            break


def nucleus_loop_of_fixed_length(device: str) -> Iterator[None]:
    """Runs on: rows that have stopped repeat their last token."""
    table, ids = torch.randn(16, 16, device=device), torch.zeros(2, dtype=torch.long, device=device)
    done = torch.zeros(2, dtype=torch.bool, device=device)
    yield
    for _ in range(3):
        probs, order = F.softmax(table[ids], -1).sort(descending=True)
        probs = probs.masked_fill(probs.cumsum(-1) - probs > 0.9, 0.0)
        noise = torch.empty_like(probs).exponential_()
        fresh = order.gather(-1, (probs / noise).argmax(-1, keepdim=True))[:, 0]
        ids = torch.where(done, ids, fresh)
        done |= ids == 0


def least_share_of_the_best(device: str) -> Iterator[None]:
    """Runs on: a filter by the greatest probability."""
    logits = torch.randn(2, 16, device=device)
    yield
    probs = logits.softmax(-1)
    logits.masked_fill(probs < 0.05 * probs.amax(-1, keepdim=True), -float("inf"))


def beams_ranked(device: str) -> Iterator[None]:
    """Runs on: topk over beams and vocabulary, and a gather."""
    scores, logits = torch.zeros(2, 3, device=device), torch.randn(2, 3, 16, device=device)
    ids = torch.zeros(2, 3, 5, dtype=torch.long, device=device)
    yield
    flat = (scores.unsqueeze(-1) + logits.log_softmax(-1)).flatten(1)
    scores, best = flat.topk(3)
    beam, token = best.div(16, rounding_mode="floor"), best % 16
    ids = torch.cat([ids.gather(1, beam.unsqueeze(-1).expand_as(ids)), token.unsqueeze(-1)], -1)


def beams_kept_as_python_hypotheses(device: str) -> Iterator[None]:
    """Waits: zip over tensors unpacks them on the host."""
    scores, best = torch.randn(16, device=device).topk(4)
    yield
    [(float(score), int(token)) for score, token in zip(scores, best, strict=True)]


def words_forbidden_by_a_list(device: str) -> Iterator[None]:
    """Waits: the list of columns goes up."""
    logits = torch.randn(2, 16, device=device)
    yield
    logits[:, [3, 5, 7]] = -float("inf")


def repeats_forbidden_by_n_grams(device: str) -> Iterator[None]:
    """Waits: the ids are read back to look for repeats."""
    ids, logits = torch.randint(16, (2, 6), device=device), torch.randn(2, 16, device=device)
    yield
    for row, words in enumerate(ids.tolist()):
        seen = [b for a, b in itertools.pairwise(words) if a == words[-1]]
        for word in seen:
            logits[row, word].fill_(-float("inf"))


def cache_that_grows_by_cat(device: str) -> Iterator[None]:
    """Runs on: shapes are the host's."""
    keys, fresh = torch.randn(1, 2, 5, 4, device=device), torch.randn(1, 2, 1, 4, device=device)
    yield
    keys = torch.cat([keys, fresh], dim=2)
    F.scaled_dot_product_attention(fresh, keys, keys)


def cache_evicted_by_score(device: str) -> Iterator[None]:
    """Runs on: a fixed number of places is kept."""
    keys, score = torch.randn(2, 9, 4, device=device), torch.rand(2, 9, device=device)
    yield
    kept = score.topk(5, dim=1).indices.sort(dim=1).values
    keys.gather(1, kept.unsqueeze(-1).expand(-1, -1, 4))


def pictures_placed_among_words(device: str) -> Iterator[None]:
    """Runs on: masked_scatter copies as many rows as the mask has, and asks nobody."""
    words, pictures = torch.randn(1, 6, 4, device=device), torch.randn(2, 4, device=device)
    mask = (torch.arange(6, device=device) % 3 == 0).view(1, 6, 1).expand(1, 6, 4)
    yield
    words.masked_scatter(mask, pictures)


def pictures_counted_before_they_are_placed(device: str) -> Iterator[None]:
    """Waits: the number of places is compared with the number of rows."""
    words, pictures = torch.randn(1, 6, 4, device=device), torch.randn(2, 4, device=device)
    mask = (torch.arange(6, device=device) % 3 == 0).view(1, 6, 1).expand(1, 6, 4)
    yield
    if words[mask].numel() != pictures.numel():
        raise ValueError
    words.masked_scatter(mask, pictures)


def ancestral_sampler_that_looks_at_its_sigmas(device: str) -> Iterator[None]:
    """Waits: the next noise level is compared on the host."""
    x, sigmas = torch.randn(1, 3, 4, 4, device=device), torch.linspace(4, 0, 4, device=device)
    yield
    for i in range(len(sigmas) - 1):
        x = x + (x * 0.1) * (sigmas[i + 1] - sigmas[i])
        if sigmas[i + 1] > 0:
            x = x + torch.randn_like(x) * sigmas[i + 1]


def posterior_sampler_over_python_steps(device: str) -> Iterator[None]:
    """Runs on: tables on the device, indexed by Python numbers, are views."""
    x, betas = torch.randn(1, 3, 4, 4, device=device), torch.linspace(1e-4, 0.02, 4, device=device)
    alphas = (1 - betas).cumprod(0)
    yield
    for t in reversed(range(4)):
        x = (x - betas[t] / (1 - alphas[t]).sqrt() * x.tanh()) * (1 - betas[t]).rsqrt()
        if t > 0:
            x = x + betas[t].sqrt() * torch.randn_like(x)


def guidance_from_two_halves(device: str) -> Iterator[None]:
    """Runs on: chunk and a weighted sum."""
    x = torch.randn(1, 4, 8, 8, device=device)
    yield
    empty, told = (torch.cat([x, x]) * 0.5).chunk(2)
    empty + 7.5 * (told - empty)


def steps_of_a_scheduler_found_by_equality(device: str) -> Iterator[None]:
    """Waits: the index of a timestep is looked up by nonzero().item()."""
    timesteps, t = torch.arange(9, -1, -1, device=device), torch.tensor(5).to(device)
    yield
    (timesteps == t).nonzero()[0].item()


def rewards_normalised(device: str) -> Iterator[None]:
    """Runs on: a mean and a deviation."""
    rewards = torch.randn(4, 8, device=device)
    yield
    (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def target_values_with_done_flags(device: str) -> Iterator[None]:
    """Runs on: flags multiply."""
    value, done = torch.randn(8, 3, device=device), torch.rand(8, device=device) > 0.5
    yield
    torch.randn(8, device=device) + 0.99 * value.amax(1) * (~done)


def actions_for_an_environment(device: str) -> Iterator[None]:
    """Waits: the environment lives on the host."""
    logits = torch.randn(4, 3, device=device)
    yield
    logits.argmax(-1).cpu().numpy()


def squashed_gaussian_unchecked(device: str) -> Iterator[None]:
    """Runs on: nothing is validated."""
    mean, spread = torch.randn(4, 2, device=device), torch.rand(4, 2, device=device) + 0.1
    yield
    normal = td.Normal(mean, spread, validate_args=False)
    x = normal.rsample()
    (normal.log_prob(x) - torch.log(1 - x.tanh() ** 2 + 1e-6)).sum(-1)


def squashed_gaussian_by_transforms(device: str) -> Iterator[None]:
    """Waits: the base distribution checks its parameters."""
    mean, spread = torch.randn(4, 2, device=device), torch.rand(4, 2, device=device) + 0.1
    yield
    policy = td.TransformedDistribution(td.Normal(mean, spread), [td.TanhTransform(cache_size=1)])
    policy.log_prob(policy.rsample())


def coin_with_its_probability(device: str) -> Iterator[None]:
    """Waits: parameters and value are checked."""
    logits = torch.randn(4, device=device)
    yield
    coin = td.Bernoulli(logits=logits)
    coin.log_prob(coin.sample())


def divergence_of_two_gaussians(device: str) -> Iterator[None]:
    """Runs on: a formula."""
    a = td.Normal(torch.zeros(3, device=device), torch.ones(3, device=device), validate_args=False)
    b = td.Normal(torch.ones(3, device=device), torch.ones(3, device=device), validate_args=False)
    yield
    td.kl_divergence(a, b).sum()


def mixture_of_gaussians(device: str) -> Iterator[None]:
    """Waits: weights, means and values are checked."""
    weights, mean = torch.rand(4, 3, device=device), torch.randn(4, 3, device=device)
    yield
    mixture = td.MixtureSameFamily(td.Categorical(weights), td.Normal(mean, torch.ones_like(mean)))
    mixture.log_prob(mean[:, 0])


def relaxed_categories(device: str) -> Iterator[None]:
    """Runs on: hard Gumbel samples scatter a number."""
    logits = torch.randn(4, 5, device=device, requires_grad=True)
    yield
    F.gumbel_softmax(logits, tau=0.7, hard=True).sum().backward()


def counts_drawn(device: str) -> Iterator[None]:
    """Runs on: random kernels."""
    rate = torch.rand(8, device=device)
    yield
    torch.poisson(rate)
    torch.bernoulli(rate)
    torch.empty_like(rate).geometric_(0.5)
    torch._standard_gamma(rate + 1)


def indices_drawn_by_weight(device: str) -> Iterator[None]:
    """Runs on: with replacement, several draws, checks are the kernel's."""
    weights = torch.rand(9, device=device)
    yield
    torch.multinomial(weights, 4, replacement=True)
