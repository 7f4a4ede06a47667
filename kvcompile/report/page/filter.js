// Shows and hides the rows of the table of sites; the page's address holds the filter, so that a link shows the same rows.
"use strict";

(() => {
  const sites = [...document.querySelectorAll("tr.site")].map((row) => ({
    row,
    details: row.nextElementSibling,
    toggle: row.querySelector(".toggle"),
    text: (row.textContent + " " + row.nextElementSibling.textContent).toLowerCase(),
  }));
  if (sites.length === 0) return;
  const layer = document.getElementById("layer");
  const graph = document.getElementById("graph");
  const text = document.getElementById("text");
  const outcomes = [...document.querySelectorAll("input[name=outcome]")];

  const show = (site, visible) => {
    site.row.hidden = !visible;
    site.details.hidden = !visible || site.toggle.getAttribute("aria-expanded") === "false";
  };

  const filter = () => {
    const wanted = new Set(outcomes.filter((box) => box.checked).map((box) => box.value));
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const site of sites) {
      const data = site.row.dataset;
      const visible =
        (layer.value === "" || data.layer === layer.value) &&
        (!graph || graph.value === "" || data.graph === graph.value) &&
        wanted.has(data.outcome) &&
        words.every((word) => site.text.includes(word));
      show(site, visible);
      shown += visible;
    }
    for (const title of document.querySelectorAll("tr.graph")) {
      title.hidden = ![...title.parentElement.querySelectorAll("tr.site")].some((row) => !row.hidden);
    }
    document.getElementById("shown").textContent = `${shown} of ${sites.length} sites`;
    document.getElementById("none").hidden = shown > 0;
  };

  const remember = () => {
    const state = new URLSearchParams();
    if (layer.value) state.set("layer", layer.value);
    if (graph && graph.value) state.set("graph", graph.value);
    if (text.value) state.set("text", text.value);
    const hidden = outcomes.filter((box) => !box.checked).map((box) => box.value);
    if (hidden.length) state.set("without", hidden.join(","));
    history.replaceState(null, "", "#" + state);
  };

  const restore = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    layer.value = state.get("layer") || "";
    if (layer.selectedIndex < 0) layer.value = "";
    if (graph) {
      graph.value = state.get("graph") || "";
      if (graph.selectedIndex < 0) graph.value = "";
    }
    text.value = state.get("text") || "";
    const hidden = (state.get("without") || "").split(",");
    for (const box of outcomes) box.checked = !hidden.includes(box.value);
    filter();
  };

  for (const site of sites) {
    site.toggle.setAttribute("aria-expanded", "false");
    site.toggle.addEventListener("click", () => {
      site.toggle.setAttribute("aria-expanded", String(site.toggle.getAttribute("aria-expanded") === "false"));
      show(site, true);
    });
  }
  for (const control of [layer, graph, text, ...outcomes]) {
    if (control) control.addEventListener("input", () => { filter(); remember(); });
  }
  document.getElementById("reset").addEventListener("click", () => {
    history.replaceState(null, "", "#");
    restore();
  });
  window.addEventListener("hashchange", restore);
  restore();
})();
