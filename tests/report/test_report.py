"""The report gives the outcome and the reason of every site; counters, logs and ``explain`` agree with it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from decode_steps import step
from torch import Tensor, nn
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.errors import UnsupportedSiteError
from kvcompile.passes.refusal import Reason
from kvcompile.passes.site import CacheSummary, Site
from kvcompile.report.data import GraphReport
from kvcompile.report.origin import Origin, PlainCache
from kvcompile.report.report import Report, collect_reports, last_report, note, ran, record


def cache(role: str, format: str = "int8_per_token_head", source: str = "keys", after: int = 132) -> CacheSummary:
    source = f"L['cache'].{source}.{role}"
    return CacheSummary(role, "static", "index_put", source, (1, 2, "s27", 128), "bfloat16", format, 256, after)


def rewritten(layer: int, source: str | None = None) -> Site:
    source = source or f"layers[{layer}]"
    caches = (cache("key", source=source), cache("value", "int4_per_token_head", source=source, after=68))
    return Site(f"model.layers.{layer}.self_attn", layer, "sdpa, causal", caches)


def refused(layer: int, reason: Reason = Reason.used_elsewhere) -> Site:
    text = reason.value.format(role="key", source="L['cache'].keys", user="aten.sum")
    return Site(f"model.layers.{layer}.cross_attn", layer, "sdpa", reason=text, reason_code=reason.name)


@pytest.fixture(autouse=True)
def _fresh_counters() -> Iterator[None]:
    counters["kvquant"].clear()
    yield
    counters["kvquant"].clear()


# Recording


def test_the_last_report_is_on_the_graph_that_was_compiled_last() -> None:
    record([rewritten(0)])
    record([refused(1)])
    assert last_report() == Report([GraphReport((refused(1),))])


def test_collect_reports_gathers_the_graphs_of_all_threads_and_only_of_its_block() -> None:
    record([rewritten(0)])
    with collect_reports() as outer:
        with collect_reports() as inner:
            threads = [threading.Thread(target=record, args=([rewritten(i)],)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        record([refused(1)])
    record([refused(2)])
    assert {site.layer for site in inner.sites} == set(range(8))
    assert outer.graphs == [*inner.graphs, GraphReport((refused(1),))]


def test_counters_count_sites_by_outcome() -> None:
    record([rewritten(0), rewritten(1), refused(2), refused(3, Reason.policy_auto), refused(4, Reason.no_cache)])
    record([refused(0)])
    assert dict(counters["kvquant"]) == {
        "graphs": 2,
        "sites": 6,
        "rewritten": 2,
        "refused": 2,
        "refused_used_elsewhere": 2,
        "skipped": 2,
    }


def test_the_log_has_a_line_a_site_and_the_reason_of_each_refusal(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kvcompile"):
        record([rewritten(0), refused(1)])
    assert caplog.messages == [
        "rewritten: model.layers.0.self_attn: sdpa, causal: key static index_put -> int8_per_token_head, "
        "value static index_put -> int4_per_token_head",
        "refused: model.layers.1.cross_attn: sdpa: its key cache L['cache'].keys is also used by aten.sum",
    ]


def test_a_note_of_a_run_reaches_the_last_report_and_the_open_ones_once(caplog: pytest.LogCaptureFixture) -> None:
    with collect_reports() as report:
        record([rewritten(0)])
        note("a remark")
        note("a remark")
    assert report.notes == last_report().notes == ["a remark"]
    assert counters["kvquant"]["notes"] == 2
    assert caplog.messages == ["a remark", "a remark"]


# Calls


@pytest.mark.usefixtures("without_code_generation")
def test_a_function_that_dynamo_compiles_no_more_is_noted_with_the_number_that_changes() -> None:
    class Counting(nn.Module):
        offset = 0

        def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            pos = torch.arange(1) + self.offset
            self.offset += 1
            return step(q, k, v, keys, values, pos)

    def without_attention(q: Tensor, n: list[int]) -> Tensor:
        return q * n[0]

    model, other = (torch.compile(function, backend="kvquant") for function in (Counting(), without_attention))
    keys, values = (torch.zeros(1, 2, 70, 64) for _ in range(2))
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2), kvcompile.collect_reports() as report:
        for number in range(4):
            q, k, v = torch.randn(3, 1, 2, 1, 64).unbind()
            model(q, k, v, keys, values)
            other(q, [2] * (number + 1))  # compiled again for each length
    (note,) = report.notes
    assert note == (
        f"forward (test_report.py:{Counting.forward.__code__.co_firstlineno}) is not compiled again, and steps that "
        "need new code run in eager code, because Dynamo's recompile_limit is reached; the last recompilation was "
        "due to self.offset == 1; set torch._dynamo.config.allow_unspec_int_on_nn_module = True, or keep the number "
        "that changes in a tensor"
    )


@pytest.mark.usefixtures("without_code_generation")
def test_a_report_on_nothing_names_the_lines_that_broke_the_graph() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        torch._dynamo.graph_break()
        return q * 2

    caches = torch.zeros(2, 1, 2, 70, 64).unbind()
    with torch.no_grad(), kvcompile.collect_reports() as report:
        torch.compile(fn, backend="kvquant")(*torch.randn(3, 1, 2, 1, 64).unbind(), *caches, torch.arange(1))
    (note,) = report.notes
    line = fn.__code__.co_firstlineno + 2
    assert note.endswith(f"; graphs broke at test_report.py:{line}: torch._dynamo.graph_break()")


def test_calls_that_ran_plain_are_counted_apart_by_graph_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    earlier = record([rewritten(9)])
    with collect_reports() as report:
        prefill, decode = record([rewritten(0)]), record([rewritten(0)])
        ran(prefill, plain_because="a view is alive")
        for reason in (None, "a view is alive", None, "it is a view"):
            ran(decode, plain_because=reason)
        ran(earlier, plain_because="a view is alive")
    assert (report.totals.calls, report.totals.plain_calls) == (6, 4)
    assert report.notes == [
        "graph 1: 1 of 1 calls ran as plain Inductor would: a view is alive",
        "graph 2: 2 of 4 calls ran as plain Inductor would: a view is alive; it is a view",
        "a graph that was compiled before: 1 of 1 calls ran as plain Inductor would: a view is alive",
    ]
    assert [(graph["calls"], graph["plain_calls"]) for graph in report.to_dict()["graphs"]] == [(1, 1), (4, 2)]
    assert (counters["kvquant"]["packed_calls"], counters["kvquant"]["plain_calls"]) == (2, 4)
    assert caplog.messages[0] == "a call ran as plain Inductor would: a view is alive"


def test_a_reason_for_plain_calls_is_logged_once_for_each_graph(caplog: pytest.LogCaptureFixture) -> None:
    graph, other = record([rewritten(0)]), record([rewritten(1)])
    for reason in ["a view is alive"] * 3 + ["it is a view"] * 2:
        ran(graph, plain_because=reason)
    ran(other, plain_because="a view is alive")
    assert [message.partition(": ")[2] for message in caplog.messages if "plain Inductor" in message] == [
        "a view is alive",
        "it is a view",
        "a view is alive",
    ]


def test_bytes_of_a_graph_count_unless_all_its_calls_ran_plain() -> None:
    graph, other = GraphReport((rewritten(0),)), GraphReport((rewritten(1),))
    report = Report([graph, other])
    report.count_call(graph, "a view is alive")
    report.count_call(other, None)
    assert report.totals.bytes_per_token_before == 2 * 256
    report.count_call(graph, None)
    assert report.totals.bytes_per_token_before == 4 * 256
    report = Report([graph])
    report.count_call(graph, "a view is alive")
    assert report.totals.ratio is None
    assert str(report).splitlines()[-3:] == [
        "note: graph 1: 1 of 1 calls ran as plain Inductor would: a view is alive",
        "1 attention layer: 1 rewritten, 0 refused, 0 skipped",
        "1 of 1 calls ran as plain Inductor would",
    ]


@pytest.mark.usefixtures("without_code_generation")
def test_a_model_whose_caches_have_views_is_told_that_nothing_ran_packed() -> None:
    model = Model().requires_grad_(False)
    views = [layer.keys[0] for layer in model.layers]
    compiled = torch.compile(model, backend="kvquant")
    with torch.no_grad(), collect_reports() as report:
        for _ in range(3):
            compiled(*INPUTS)
    assert len(views) == report.totals.rewritten == 2
    assert (report.totals.calls, report.totals.plain_calls, report.totals.ratio) == (3, 3, None)
    assert "graph 1: 3 of 3 calls ran as plain Inductor would: cache of shape (1, 1, 32, 64)" in report.notes[0]
    assert kvcompile.explain(model, *INPUTS).totals.plain_calls == 0  # explain runs on copies, which have no views
    views.clear()
    with torch.no_grad(), collect_reports() as report:
        compiled(*INPUTS)
    assert (report.totals.calls, report.totals.plain_calls, report.notes) == (1, 0, [])


# on_unsupported


def test_on_unsupported_error_raises_with_module_reason_and_remedy() -> None:
    with pytest.raises(UnsupportedSiteError) as caught:
        GraphReport((rewritten(0), refused(1))).enforce("error")
    assert caught.value.module == "model.layers.1.cross_attn"
    assert str(caught.value) == (
        "model.layers.1.cross_attn: its key cache L['cache'].keys is also used by aten.sum; "
        f"{Reason.used_elsewhere.remedy}; "
        "or give this module `dtype: auto` in the policy, or set on_unsupported to warn"
    )


def test_on_unsupported_warn_warns_once_for_every_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kvcompile"):
        GraphReport(tuple(refused(i) for i in range(5))).enforce("warn")
    (message,) = caplog.messages
    assert message.startswith("kvquant leaves model.layers.0.cross_attn, model.layers.1.cross_attn,")
    assert message.endswith("and 2 more to plain Inductor: its key cache L['cache'].keys is also used by aten.sum")


def test_on_unsupported_ignore_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kvcompile"):
        GraphReport((refused(0),)).enforce("ignore")
    assert not caplog.messages


@pytest.mark.parametrize("reason", [Reason.policy_auto, Reason.no_cache])
def test_a_site_skipped_on_request_or_without_cache_is_no_refusal(reason: Reason) -> None:
    GraphReport((refused(0, reason),)).enforce("error")


# Totals and text


def test_totals_add_up() -> None:
    totals = Report([GraphReport((rewritten(0), rewritten(1), refused(2)))]).totals
    assert (totals.graphs, totals.sites, totals.rewritten, totals.refused, totals.skipped) == (1, 3, 2, 1, 0)
    assert (totals.bytes_per_token_before, totals.bytes_per_token_after) == (4 * 256, 2 * (132 + 68))
    assert totals.ratio == 1024 / 400


def with_plain_caches(*sites: Site, bytes_per_token: int = 512) -> GraphReport:
    """A graph whose model attends to keys and values of these bytes in every layer."""
    plain = {site.module: [PlainCache("bfloat16", bytes_per_token)] for site in sites}
    return GraphReport(sites, origin=Origin("Model", "int8", "", "kvcompile 0", "2026-01-01 12:00", plain))


def test_the_whole_model_counts_its_unpacked_layers() -> None:
    graph = with_plain_caches(rewritten(0), refused(1), refused(2, Reason.policy_auto), refused(3, Reason.no_cache))
    totals = Report([graph]).totals
    assert (totals.layers, totals.packed_layers, totals.refused_layers, totals.skipped_layers) == (4, 1, 1, 2)
    assert totals.unpacked_bytes_per_token == 2 * 512, "a layer without a cache has no bytes"
    assert (totals.model_bytes_before, totals.model_bytes_after) == (512 + 2 * 512, 200 + 2 * 512)
    assert totals.ratio == 1536 / 1224
    assert totals.packed_ratio == 512 / 200
    assert str(Report([graph])).splitlines()[-3:] == [
        "4 attention layers: 1 rewritten, 1 refused, 2 skipped",
        "1536 -> 1224 bytes per token and KV head over all layers: 1.25 times smaller than bfloat16",
        "  512 -> 200 in packed layers, 2.56 times smaller; 1024 in unpacked layers",
    ]


def test_a_layer_of_two_graphs_is_one_layer_and_packed_if_one_packs_it_and_the_summary_names_a_refusal() -> None:
    prefill = with_plain_caches(refused(0), refused(1))
    decode = with_plain_caches(rewritten(0), refused(1))
    decode.sites[0].module = prefill.sites[0].module
    totals = Report([prefill, decode]).totals
    assert (totals.sites, totals.layers, totals.packed_layers, totals.refused_layers) == (4, 2, 1, 1)
    assert totals.unpacked_bytes_per_token == 512
    shown = str(Report([prefill, decode]))
    assert "2 attention layers: 1 rewritten, 1 refused, 0 skipped (in 2 graphs)\n" in shown
    assert "\nanother graph refuses 1 of the rewritten layers\n" in shown


def test_caches_of_a_graph_that_only_ran_plain_count_as_unpacked() -> None:
    graph, other = with_plain_caches(rewritten(0)), with_plain_caches(rewritten(1))
    report = Report([graph, other])
    report.count_call(graph, "a view is alive")
    assert (report.totals.model_bytes_before, report.totals.model_bytes_after) == (1024, 200 + 512)


def test_a_cache_that_two_sites_share_counts_once() -> None:
    shared = Report([GraphReport((rewritten(0, "shared"), rewritten(1, "shared")))])
    assert shared.totals.bytes_per_token_before == 2 * 256


def test_a_cache_that_two_graphs_use_counts_once() -> None:
    prefill, decode = GraphReport((rewritten(0, "zeros"),)), GraphReport((rewritten(0, "layers[0]"),))
    assert Report([prefill, decode]).totals.bytes_per_token_before == 2 * 256
    assert Report([prefill, decode]).totals.rewritten == 2


def test_two_caches_of_one_module_count_twice() -> None:
    assert Report([GraphReport((rewritten(0, "a"), rewritten(0, "b")))]).totals.bytes_per_token_before == 4 * 256


def test_the_text_has_a_row_a_site_with_reasons_and_totals() -> None:
    text = str(Report([GraphReport((rewritten(0), refused(1)))], ["a remark"]))
    assert text.splitlines() == [
        "graph 1: 2 attention layers",
        "",
        "| module                    | cache            | attention    | formats (K / V)       |      bytes |",
        "|---------------------------|------------------|--------------|-----------------------|------------|",
        "| model.layers.0.self_attn  | static index_put | sdpa, causal | int8_per_token_head / | 512 -> 200 |",
        "|                           |                  |              | int4_per_token_head   |            |",
        "| model.layers.1.cross_attn |                  | sdpa         | refused:              |            |",
        "|                           |                  |              | used_elsewhere        |            |",
        "",
        "refused: model.layers.1.cross_attn: its key cache L['cache'].keys is also used by aten.sum",
        "  to do: drop the other use, or move it out of the compiled function: eager code may read a packed",
        "cache in any way",
        "note: a remark",
        "2 attention layers: 1 rewritten, 1 refused, 0 skipped",
        "512 -> 200 bytes per token and KV head over all layers: 2.56 times smaller than bfloat16",
    ]


def test_the_text_fits_100_columns_whatever_the_names() -> None:
    sites = [rewritten(0), refused(1), rewritten(2)]
    sites[0].module = ".".join(["a_rather_long_module_name"] * 6)
    sites[1].module = ""
    sites[2].attention = "written out, bool mask, softcap, sinks, gqa 8, scale 0.08838834764831845"
    assert max(map(len, str(Report([GraphReport(tuple(sites))])).splitlines())) <= 100


def test_the_title_of_a_column_keeps_its_line_above_short_names() -> None:
    site = rewritten(0)
    site.module = "m"
    assert "| module | cache" in str(Report([GraphReport((site,))]))


def test_graphs_with_the_same_rows_are_printed_once() -> None:
    graph = GraphReport((rewritten(0),))
    text = str(Report([graph, graph]))
    assert "graph 2: 1 attention layer, as in graph 1" in text
    assert text.count("model.layers.0.self_attn") == 1


def test_a_report_without_graphs_says_so_in_one_line() -> None:
    assert str(Report()) == "kvquant has found no attention in a compiled graph yet"
    assert str(Report(remarks=["no attention was found in Linear"])) == "no attention was found in Linear"


def test_a_report_without_graphs_says_what_ran() -> None:
    report = Report(remarks=["a remark"], eager_requests=1)
    eager = "1 request of generate() ran on packed caches in eager code"
    assert str(report) == f"no attention was compiled here; {eager}\nnote: a remark"
    report.count_call(GraphReport((rewritten(0),)), None)
    earlier = "1 call ran graphs that were compiled before"
    assert str(report).startswith(f"no attention was compiled here; {earlier} and {eager}\n")


def test_json_holds_everything() -> None:
    report = Report([GraphReport((rewritten(0), refused(1)))], ["a remark"])
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    first_totals = list(data["totals"])[:3]
    assert first_totals == ["model_bytes_per_token_before", "model_bytes_per_token_after", "ratio"], "of all layers"
    assert data["totals"]["rewritten"] == 1
    first, second = data["graphs"][0]["sites"]
    assert first["outcome"] == "rewritten"
    assert first["caches"][0]["format"] == "int8_per_token_head"
    assert second["outcome"] == "refused"
    assert second["reason_code"] == "used_elsewhere"
    assert data["notes"] == ["a remark"]


# explain


@pytest.mark.usefixtures("without_code_generation")
def test_the_report_of_a_model_knows_its_class_its_policy_and_its_plain_caches() -> None:
    policy = {"version": 1, "rules": [{"match": {"layers": "1"}, "dtype": "auto"}], "default": {"dtype": "fp8_e4m3"}}
    report = kvcompile.explain(Model(), *INPUTS, policy=policy)
    (graph,) = report.graphs
    assert graph.origin is not None
    assert (graph.origin.model, graph.origin.policy[:7]) == ("Model", "Policy ")
    assert "fp8_e4m3" in graph.origin.policy_text
    assert torch.__version__ in graph.origin.versions
    totals = report.totals
    assert totals.plain_dtypes == ("float32",)
    assert totals.unpacked_bytes_per_token == 2 * 64 * 4
    assert totals.model_bytes_before == 4 * 64 * 4
    assert report.to_dict()["graphs"][0]["origin"]["model"] == "Model"


class Attention(nn.Module):
    """One decode step of attention with a cache in the module's own buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 3 * 64)
        self.register_buffer("keys", torch.zeros(1, 1, 32, 64))
        self.register_buffer("values", torch.zeros(1, 1, 32, 64))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.proj(x)[:, None].chunk(3, dim=-1)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        return F.scaled_dot_product_attention(q, self.keys, self.values)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, position)[:, 0]
        return x


INPUTS = (torch.ones(1, 1, 64), torch.tensor([3]))


@pytest.mark.usefixtures("without_code_generation")
def test_explain_reports_every_site_under_the_policy() -> None:
    policy = {"rules": [{"match": {"layers": "0"}, "dtype": "fp8_e4m3"}], "default": {"dtype": "auto"}}
    report = kvcompile.explain(Model(), *INPUTS, policy=policy)
    first, second = report.sites
    assert first.module == "layers.0"
    assert [cache.format for cache in first.caches] == ["fp8_e4m3", "fp8_e4m3"]
    assert second.reason_code == "policy_auto"


@pytest.mark.usefixtures("without_code_generation")
def test_explain_says_that_a_model_has_no_attention_and_names_graph_breaks(caplog: pytest.LogCaptureFixture) -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    assert kvcompile.explain(nn.Linear(4, 4), torch.ones(2, 4)).notes == ["no attention was found in Linear"]
    (note,) = kvcompile.explain(broken, torch.ones(2)).notes
    assert note.startswith("no attention was found in broken; graphs broke at test_report.py:")
    assert str(kvcompile.verify(nn.Linear(4, 4), torch.ones(2, 4))) == "no attention was found in Linear"
    assert not caplog.records


@pytest.mark.usefixtures("without_code_generation")
def test_explain_leaves_the_model_and_the_arguments_unchanged() -> None:
    model, (x, position) = Model(), INPUTS
    kvcompile.explain(model, x, position=position)
    for layer in model.layers:
        assert type(layer.keys) is Tensor
        assert not layer.keys.any()


@pytest.mark.usefixtures("without_code_generation")
def test_explain_neither_uses_nor_drops_earlier_compilations() -> None:
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend="kvquant")
    limit = 2
    with torch.no_grad(), collect_reports() as report, torch._dynamo.config.patch(recompile_limit=limit):
        compiled(*INPUTS)
        graphs = len(report.graphs)
        for _ in range(limit + 1):
            assert kvcompile.explain(compiled, *INPUTS).totals.rewritten == 2
        explained = len(report.graphs)
        compiled(*INPUTS)
    assert graphs >= 1
    assert len(report.graphs) <= explained + 1, "one more graph, for the caches that are packed by now"
