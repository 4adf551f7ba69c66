"""Samples of background patches: no candidate is missed, the background term is unbiased, stores of them."""

# ruff: noqa: F811  (fixtures of other files are used as arguments)

from itertools import combinations
from math import comb, e

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from noctowl.data.batch import FAR_AWAY, Item, collate
from noctowl.errors import DataError
from noctowl.features import chunks
from noctowl.features import store as in_memory
from noctowl.losses import box_distances
from noctowl.matcher import match
from noctowl.store import FeatureStore, background_error, build, info, verify
from noctowl.store.sample import Target, candidates, class_range, draw, thin

from .test_matcher import GRID, random_problem
from .test_module import make_item, make_module
from .test_store import CPU, WORK, detector, image_set, images, store  # noqa: F401
from .test_store_faults import flip

HANDMADE = {0: [Target(torch.tensor([[0.1, 0.1, 0.4, 0.4]]), 11)], 3: [Target(torch.tensor([[0.5, 0.5, 0.9, 0.8]]), 3)]}


class TestCandidates:
    def test_range_of_the_class_term(self):
        """0.43 covers vocabularies of eleven columns; fewer columns leave the softmax more room."""
        for columns in (2, 3, 6, 11):
            corners = torch.tensor([[1.0] + [-1.0] * (columns - 1), [-1.0] + [1.0] * (columns - 1)])
            high, low = corners.softmax(1)[:, 0].tolist()
            assert class_range(columns) == pytest.approx(high - low, abs=1e-6)
        assert class_range(11) == pytest.approx(e / (e + 10 / e) - 1 / (1 + 10 * e * e), abs=1e-12)
        assert 0.411 < class_range(11) < 0.412 < 0.43 < class_range(10)

    def test_by_hand(self):
        """Geometry of the four quarters for a box over the first: -1, then 1 + ..., far above -1 + 0.42."""
        objects = GRID[:1]
        assert candidates(pred_boxes=GRID, targets=[Target(objects, 11)]).tolist() == [True, False, False, False]
        # two objects of one caption: each may be pushed to its second cheapest patch
        both = [Target(GRID[[0, 0]], 11)]
        assert candidates(pred_boxes=GRID, targets=both).tolist() == [True, True, True, False]
        # a neighbour of a candidate is kept although its own cost is too high
        boxes = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0.862], [0, 0, 0.7, 0.7]])
        near = candidates(pred_boxes=boxes, targets=[Target(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), 11)])
        assert near.tolist() == [True, True, False]
        # an overlap of 0.84996 rounds to more than 0.85 on some device: kept, 0.8498 is not
        tall = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0.84996], [0, 0, 1, 0.8498]])
        flat = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
        assert candidates(pred_boxes=tall, targets=[Target(flat, 1)]).tolist() == [True, True, False]

    @pytest.mark.parametrize(("columns", "objects"), [(11, 1), (2, 1), (6, 3), (11, 7), (1, 2)])
    def test_the_assignment_never_leaves_them(self, columns, objects):
        """Any head: similarities over the whole range; the assignment on the kept patches is that on all."""
        left_out = 0
        for seed in range(15):
            boxes, sims, truth = random_problem(1, 60, columns, objects, seed)
            sims = (3 * sims).clamp(-1, 1)  # corners of the range are common
            kept = candidates(pred_boxes=boxes[0], targets=[Target(truth[0], columns)])
            rows = kept.nonzero().flatten()
            left_out += 60 - len(rows)
            whole = match(pred_boxes=boxes, similarities=sims, gt_boxes=truth)
            part = match(pred_boxes=boxes[:, rows], similarities=sims[:, rows], gt_boxes=truth)
            assert torch.equal(rows[part.matched_patch], whole.matched_patch)
            assert torch.equal(part.positive[0], whole.positive[0, rows])
            assert not whole.positive[0, ~kept].any()
        assert left_out > 100  # of 900: the claim is not empty

    @pytest.mark.parametrize(("columns", "objects"), [(11, 1), (3, 2), (11, 5)])
    def test_extreme_heads(self, columns, objects):
        """Each set of patches in turn at the top of the range, all others at the bottom: nothing else is reached, and
        for one object nearly every candidate is."""
        low = torch.tensor([-1.0] + [1.0] * (columns - 1))
        for seed in range(4):
            boxes, _, truth = random_problem(1, 60, columns, objects, seed)
            kept = candidates(pred_boxes=boxes[0], targets=[Target(truth[0], columns)])
            generator = torch.Generator().manual_seed(seed)
            favoured = torch.eye(60, dtype=torch.bool)
            for _ in range(objects - 1):  # as many as there are objects
                favoured |= torch.eye(60, dtype=torch.bool)[torch.randperm(60, generator=generator)]
            sims = torch.where(favoured[..., None], -low, low)  # [60 heads, P, C]
            found = match(pred_boxes=boxes.expand(60, -1, -1), similarities=sims, gt_boxes=truth.expand(60, -1, -1))
            reached = found.positive.any(0)
            assert not reached[~kept].any()
            if objects == 1:
                assert int(reached.sum()) >= int(kept.sum()) - 1  # the slack

    @pytest.mark.golden
    def test_published_targets_lie_within(self, shared):
        tensors = load_file(shared / "golden" / "loss_golden.safetensors")
        for case in ("a", "b"):
            boxes, truth, sims = (tensors[f"{case}.in.{name}"] for name in ("pred_boxes", "gt_boxes", "sims"))
            for b in range(len(boxes)):
                kept = candidates(pred_boxes=boxes[b], targets=[Target(truth[b], sims.shape[-1])])
                rows = kept.nonzero().flatten()
                found = match(
                    pred_boxes=boxes[b : b + 1, rows], similarities=sims[b : b + 1, rows], gt_boxes=truth[b : b + 1]
                )
                assert rows[found.matched_patch[0, 0]] == tensors[f"{case}.matcher.pred_idx"][b, 0]


class TestDraw:
    def test_weights_are_inverse_probabilities(self):
        candidate = torch.zeros(20, dtype=torch.bool)
        candidate[[3, 7]] = True
        counts = np.zeros(20)
        for seed in range(3000):
            rows, weights = draw(candidate, background=6, seed=seed, name="x")
            assert rows.tolist() == sorted(rows.tolist())
            assert weights[(rows == 3) | (rows == 7)].tolist() == [1, 1]
            assert float(weights.sum()) == 20
            counts[rows] += 1
        assert counts[[3, 7]].tolist() == [3000, 3000]
        others = np.delete(counts, [3, 7]) / 3000  # each 6 / 18, standard error 0.0086
        assert abs(others - 1 / 3).max() < 0.035

    def test_depends_on_seed_and_name_alone(self):
        candidate = torch.zeros(64, dtype=torch.bool)
        draws = [draw(candidate, background=8, seed=s, name=n)[0].tolist() for s, n in ((0, "a"), (0, "b"), (1, "a"))]
        assert draws[0] == draw(candidate, background=8, seed=0, name="a")[0].tolist()
        assert len({tuple(rows) for rows in draws}) == 3

    def test_k_of_all_keeps_all(self):
        candidate = torch.tensor([True, False, False, False])
        for k in (3, 4, 100):
            rows, weights = draw(candidate, background=k, seed=0, name="")
            assert (rows.tolist(), weights.tolist()) == ([0, 1, 2, 3], [1, 1, 1, 1])


def gradients(module, items):
    """Loss terms, and their gradient."""
    module.zero_grad()
    terms, _ = module.losses(collate(items))
    terms.total.backward()
    layer = module.detector.head.dense0
    return terms, torch.cat([layer.weight.grad.flatten(), layer.bias.grad]).clone()


def chosen(item: Item, rows, weights) -> Item:
    return item._replace(tokens=item.tokens[rows], patch_boxes=item.patch_boxes[rows], patch_weights=weights)


def kept_of(item: Item) -> torch.Tensor:
    return candidates(pred_boxes=item.patch_boxes, targets=[Target(item.gt_boxes, len(item.queries))])


def match_of(module, item: Item) -> torch.Tensor:
    """Foreground among all patches of an item, [1, P]."""
    similarities = module.detector.head.similarity(item.tokens[None], item.queries[None], query_epsilon=True).detach()
    return match(pred_boxes=item.patch_boxes[None], similarities=similarities, gt_boxes=item.gt_boxes[None]).positive


class TestLosses:
    @pytest.mark.parametrize("loss", ["triplet", "cross_entropy", "bce"])
    def test_with_every_patch_nothing_changes(self, fresh_detector, loss):
        module = make_module(fresh_detector(), loss)
        items = [make_item(0, columns=4), make_item(1, columns=11, objects=3)]
        full, gradient = gradients(module, items)
        sampled = [chosen(item, *draw(kept_of(item), background=64, seed=0, name="")) for item in items]
        terms, again = gradients(module, sampled)
        for name, value in full.as_dict().items():
            assert float(terms.as_dict()[name]) == pytest.approx(float(value), abs=1e-6)
        torch.testing.assert_close(again, gradient, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("loss", ["triplet", "cross_entropy", "bce"])
    def test_expectation_over_every_subset_is_exact(self, fresh_detector, loss):
        """Two of the rest of a small image, every pair once: terms and gradient are the full ones on average."""
        module = make_module(fresh_detector(), loss)
        item = make_item(5, columns=11)
        few = kept_of(item).nonzero().flatten()[:3].tolist()
        others = (~kept_of(item)).nonzero().flatten()[:6].tolist()
        rows = torch.tensor(sorted(few + others))
        item = chosen(item, rows, None)._replace(gt_boxes=item.patch_boxes[few[:1]])  # these are the whole image
        kept = kept_of(item)
        rest = (~kept).nonzero().flatten().tolist()
        assert 4 <= len(rest) < len(kept)
        full, gradient = gradients(module, [item])
        terms, sums = [], torch.zeros_like(gradient)
        for pair in combinations(rest, 2):
            own = kept.clone()
            own[list(pair)] = True
            weights = torch.ones(len(kept))
            weights[list(pair)] = len(rest) / 2
            values, one = gradients(module, [chosen(item, own.nonzero().flatten(), weights[own])])
            assert float(values.class_.detach()) == pytest.approx(float(full.class_.detach()), abs=1e-6)
            assert float(values.distillation.detach()) == pytest.approx(float(full.distillation.detach()), abs=1e-6)
            terms.append(float(values.background.detach()))
            sums += one
        assert len(terms) == comb(len(rest), 2)
        assert np.std(terms) > 1e-4  # single draws do differ
        assert np.mean(terms) == pytest.approx(float(full.background.detach()), abs=1e-6)
        torch.testing.assert_close(sums / len(terms), gradient, rtol=0, atol=1e-6)

    def test_stated_error_is_that_of_every_subset(self, fresh_detector):
        """Mean squared error of the background's gradient over all pairs, against the formula."""
        module = make_module(fresh_detector(), distill={"name": "none"})
        module.loss["weight"] = 0.0
        item = make_item(5, columns=11)
        rows = torch.cat([kept_of(item).nonzero().flatten()[:2], (~kept_of(item)).nonzero().flatten()[:6]])
        item = chosen(item, rows, None)._replace(gt_boxes=item.patch_boxes[rows[:1]])
        kept = kept_of(item)
        rest = (~kept).nonzero().flatten().tolist()
        _, gradient = gradients(module, [item])
        squares = []
        for pair in combinations(rest, 2):
            weights = torch.where(kept, 1.0, 0.0)
            weights[list(pair)] = len(rest) / 2
            own = weights > 0
            _, one = gradients(module, [chosen(item, own, weights[own])])
            squares.append(float((one - gradient).square().sum()))
        layer = module.detector.head.dense0
        head = {"weight": layer.weight.detach(), "bias": layer.bias.detach(), "queries": item.queries}
        whole, certified, errors = background_error(
            tokens=item.tokens, boxes=item.patch_boxes, objects=item.gt_boxes, sizes=(2, 6, 99), **head
        )
        behind = len(rows) - module.losses(collate([item]))[1]  # the loss is a mean over these
        assert certified == int(kept.sum())
        torch.testing.assert_close(torch.cat([whole[:, :-1].flatten(), whole[:, -1]]) / behind, gradient)
        assert errors[2] / behind**2 == pytest.approx(np.mean(squares), rel=1e-3)
        assert errors[99] == 0

    def test_mean_over_seeds_agrees_within_its_standard_error(self, fresh_detector):
        """Two images of different length in a batch, as they are drawn and padded in training."""
        module = make_module(fresh_detector())
        items = [make_item(2, columns=11), make_item(3, columns=11, objects=2)]
        full, gradient = gradients(module, items)
        found, direction = [], gradient / gradient.norm()
        for seed in range(60):
            own = [
                chosen(item, *draw(kept_of(item), background=8, seed=seed, name=str(i))) for i, item in enumerate(items)
            ]
            terms, one = gradients(module, own)
            found.append((float(terms.background.detach()), float(one @ direction)))
        mean, error = np.mean(found, 0), np.std(found, 0) / 60**0.5
        assert (error > 0).all()
        assert abs(mean - [float(full.background.detach()), float(gradient.norm())]).tolist() < (3.5 * error).tolist()

    def test_padding_is_never_chosen_nor_counted(self, fresh_detector):
        module = make_module(fresh_detector())
        item = make_item(4, columns=11)
        rows, weights = draw(kept_of(item), background=5, seed=0, name="")
        long = make_item(6, columns=11)
        batch = collate([chosen(item, rows, weights), chosen(long, torch.arange(64), torch.ones(64))])
        assert batch.patch_boxes[0, len(rows) :].unique().tolist() == [FAR_AWAY]
        assert batch.patch_weights.sum(1).tolist() == [64, 64]
        both = module.losses(batch)[0]
        alone = [
            module.losses(collate([chosen(i, r, w)]))[0]
            for i, r, w in ((item, rows, weights), (long, torch.arange(64), torch.ones(64)))
        ]
        behind = [64 - int(match_of(module, i).sum()) for i in (item, long)]  # of all patches, not of those kept
        mean = sum(m * float(t.background.detach()) for m, t in zip(behind, alone)) / sum(behind)
        assert float(both.background.detach()) == pytest.approx(mean, rel=1e-5)

    def test_assignment_and_watched_distances_of_a_padded_batch(self, fresh_detector):
        """Several objects, ragged ones, samples of different length: pairs and distances are those of all patches."""
        head = make_module(fresh_detector()).detector.head
        items = [make_item(4, columns=11), make_item(6, columns=4, objects=6), make_item(7, columns=2, objects=3)]
        kept = [draw(kept_of(item), background=3 + 5 * i, seed=0, name="") for i, item in enumerate(items)]
        assert len({len(rows) for rows, _ in kept}) > 1
        found, distances = [], []
        for batch in (collate(items), collate([chosen(item, *sample) for item, sample in zip(items, kept)])):
            similarities = head.similarity(batch.tokens, batch.queries, query_epsilon=True).detach()
            truth = {"gt_boxes": batch.gt_boxes, "gt_mask": batch.gt_mask, "query_mask": batch.query_mask}
            patches = match(pred_boxes=batch.patch_boxes, similarities=similarities, **truth).matched_patch
            watched = {"pred_boxes": batch.patch_boxes, "gt_boxes": batch.gt_boxes, "matched_patch": patches}
            found.append(patches)
            distances.append([float(value) for value in box_distances(**watched)])
        for b, (rows, _) in enumerate(kept):
            real = found[0][b] >= 0
            assert torch.equal(rows[found[1][b, real]], found[0][b, real])
            assert (found[1][b, ~real] == -1).all()
        assert distances[1] == pytest.approx(distances[0], rel=1e-6)
        assert max(distances[1]) < 8

    def test_padding_has_no_gradient_where_similarities_are_zero(self, fresh_detector):
        """A head without bias gives padded tokens the similarity 0; a^gamma with gamma < 1 is vertical there."""
        module = make_module(fresh_detector())
        module.loss["gamma"] = 0.5
        torch.nn.init.zeros_(module.detector.head.dense0.bias)
        item, long = make_item(4, columns=11), make_item(6, columns=11)
        rows, weights = draw(kept_of(item), background=5, seed=0, name="")
        _, gradient = gradients(module, [chosen(item, rows, weights), chosen(long, torch.arange(64), torch.ones(64))])
        assert gradient.isfinite().all()
        assert gradient.norm() > 0

    def test_the_denominator_is_the_known_count(self, fresh_detector):
        """Every draw divides by the number of all background patches: a ratio of two random sums would be biased."""
        item = make_item(3, columns=11, objects=2)
        behind = 64 - int(match_of(make_module(fresh_detector()), item).sum())
        for seed in range(20):
            rows, weights = draw(kept_of(item), background=7, seed=seed, name="")
            positive = match_of(make_module(fresh_detector()), item)[0, rows]
            assert float(weights[~positive].sum()) == pytest.approx(behind, rel=1e-6)
            assert weights[positive].unique().tolist() == [1]


class TestStore:
    def test_holds_what_thin_keeps(self, store, detector, images):
        sampled = store.sampled(12, 7, HANDMADE)
        report = build(sampled, detector, images, **WORK)
        memory, reader = in_memory(detector, images, **WORK), sampled.reader(images)
        assert (report.images, report.encoded) == (2, 2)
        kept = 0
        for row, name in sampled.identities(images).items():
            whole = {"tokens": memory.tokens[row], "boxes": memory.boxes[row]}
            wanted = thin(whole, HANDMADE[row], background=12, seed=7, name=name)
            for key in ("tokens", "boxes", "weights"):
                assert torch.equal(getattr(reader, key)[row], wanted[key])
            assert float(reader.weights[row].sum()) == pytest.approx(64, abs=1e-4)
            assert 12 < len(reader.weights[row]) < 64
            kept += len(reader.weights[row])
        assert report.bytes == kept * (160 + 4 + 1) * 4
        assert build(sampled, detector, images, **WORK).encoded == 0
        told = next(entry for entry in info(store.root) if entry["key"] == sampled.spec.key)
        assert (told["background"], told["patches"]) == (12, kept / 2)

    def test_dtypes(self, tmp_path, detector, images):
        for dtype, worst in (("fp16", 1e-2), ("int8", 5e-2)):
            full = FeatureStore.for_model(tmp_path / "f", detector, images.preprocessor, dtype=dtype, device=CPU)
            both = [full, full.sampled(64, 0, HANDMADE)]
            for shelf in both:
                build(shelf, detector, images, [0, 3], **WORK)
            one, other = (shelf.reader(images, [0, 3]) for shelf in both)
            assert torch.equal(one.tokens[3], other.tokens[3])
            assert float((one.tokens[0] - in_memory(detector, images, **WORK).tokens[0]).abs().max()) < worst

    def test_key_and_identity(self, store, images):
        specs = [store.spec, *(store.sampled(k, seed, HANDMADE).spec for k, seed in ((8, 0), (9, 0), (8, 1)))]
        assert len({spec.key for spec in specs}) == 4
        moved = {**HANDMADE, 3: [Target(HANDMADE[3][0].boxes + 1e-3, 3)]}
        wider = {**HANDMADE, 3: [Target(HANDMADE[3][0].boxes, 4)]}
        names = [store.sampled(8, 0, targets).identities(images) for targets in (HANDMADE, moved, wider)]
        assert len({found[0] for found in names}) == 1
        assert len({found[3] for found in names}) == 3
        assert {found[3].split("+")[0] for found in names} == {store.identities(images)[3]}

    def test_evaluation_is_refused(self, store, detector, images):
        sampled = store.sampled(8, 0, HANDMADE)
        build(sampled, detector, images, **WORK)
        reader = sampled.reader(images)
        with pytest.raises(DataError, match=r"training only.*features.background=null"):
            next(chunks(reader, [0, 3], 2))
        with pytest.raises(DataError, match=r"001\.png was not asked for"):
            reader.tokens[1]
        with pytest.raises(DataError, match=r"depends on the objects"):
            build(FeatureStore.open(sampled.folder), detector, images, **WORK)

    def test_damage_and_lost_indexes(self, store, detector, images):
        targets = dict.fromkeys(range(8), HANDMADE[0])
        sampled = store.sampled(8, 0, targets)
        build(sampled, detector, images, shard_bytes=100 * 660, **WORK)
        assert verify(store.root)[0]["problems"] == []
        exact = [sampled.reader(images).tokens[row].clone() for row in range(8)]
        (first, *others) = sorted(sampled.folder.glob("shard-*.json"))
        assert others
        for path in others:
            path.unlink()
        flip(first.with_suffix(".safetensors"), -1)
        assert {p["kind"] for p in verify(store.root, repair=True)[0]["problems"]} == {"checksum", "no index"}
        sampled = store.sampled(8, 0, targets)
        assert build(sampled, detector, images, **WORK).encoded == 1
        reader = sampled.reader(images)
        assert all(torch.equal(reader.tokens[row], exact[row]) for row in range(8))
