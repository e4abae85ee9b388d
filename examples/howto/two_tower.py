"""A two-tower recommender: users and items in one space, trained with in-batch negatives.

    python examples/howto/two_tower.py

Purchases are generated from hidden preferences. The last purchase of every user is held back, and counts as
recalled if it is among the ten items that the model recommends.
"""

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torch.nn import functional as F

import kindler

USERS, ITEMS, PER_USER = 600, 300, 14


def purchases():
    """An array of users x purchases, without duplicate items."""
    draw = np.random.default_rng(0)
    tastes, kinds = draw.normal(size=(USERS, 4)), draw.normal(size=(ITEMS, 4))
    wanted = 1.5 * tastes @ kinds.T + draw.gumbel(size=(USERS, ITEMS))
    best = np.argsort(-wanted, axis=1)[:, :PER_USER]
    return draw.permuted(best, axis=1)


class TwoTowers(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)

    def user_vectors(self, user):
        return F.normalize(self.users(user), dim=1)

    def item_vectors(self, item):
        return F.normalize(self.items(item), dim=1)

    def forward(self, user, item):
        return self.user_vectors(user), self.item_vectors(item)


def in_batch_softmax(user, item, bought):
    """Each user's own item against the items of all other rows of the step, on all workers."""
    user, item, bought = (kindler.all_gather(rows) for rows in (user, item, bought))
    scores = user @ item.T / 0.1
    own = torch.eye(len(bought), dtype=torch.bool, device=scores.device)
    repeated = (bought[:, None] == bought[None, :]) & ~own  # the same item, bought by another
    scores = scores.masked_fill(repeated, -1e9)
    return F.cross_entropy(scores, torch.arange(len(bought), device=scores.device))


def main():
    bought = purchases()
    seen, held_back = bought[:, :-1], bought[:, -1]
    items = seen.ravel()
    table = pa.table({"user": np.repeat(np.arange(USERS), seen.shape[1]), "item": items, "bought": items})

    torch.manual_seed(0)
    model = TwoTowers()
    estimator = kindler.Estimator.from_torch(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=2e-2), loss=in_batch_softmax, workers=2
    )
    estimator.fit(
        table, epochs=12, batch_size=256, feature_cols=["user", "item"], label_cols="bought", verbose=0
    )

    towers = estimator.get_model()
    with torch.no_grad():
        scores = towers.user_vectors(torch.arange(USERS)) @ towers.item_vectors(torch.arange(ITEMS)).T
    scores[torch.arange(USERS)[:, None], torch.tensor(seen)] = -2  # what they already have
    top = scores.topk(10, dim=1).indices.numpy()
    popular = np.argsort(-np.bincount(items, minlength=ITEMS))[:10]
    print(f"recall at 10: {np.mean([h in row for h, row in zip(held_back, top, strict=True)]):.3f}")
    print(f"recommending the most popular: {np.isin(held_back, popular).mean():.3f}")
    print(f"for user 0: {top[0].tolist()}")


if __name__ == "__main__":
    main()
