// Theme, keyboard and charts. Every page works without this file; charts are then in the page's JSON.
(() => {
  "use strict";

  const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
  const plots = new Map();

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function yRange(_, low, high) {
    if (low === null) return [0, 1];
    const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
    // Values that differ by rounding only, such as 1 and 1.0000000001, would need marks that no number can tell apart.
    return high - low <= 1e-6 * size ? [low - size / 2, high + size / 2] : uPlot.rangeNum(low, high, 0.1, true);
  }

  function drawChart(figure) {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const place = figure.querySelector(".plot");
    if (plots.has(place)) plots.get(place).destroy();
    place.replaceChildren();
    const data = [chart.xs];
    const series = [{ label: chart.x_label }];
    const bands = [];
    chart.series.forEach((one, index) => {
      const stroke = colour(COLOURS[index % COLOURS.length]);
      data.push(one.values);
      series.push({ label: one.label, stroke, width: 2, spanGaps: true, points: { show: chart.xs.length < 80, size: 7 } });
      if (one.lows.length && one.lows.some((value) => value !== null)) {
        data.push(one.highs, one.lows);
        const edge = { stroke: stroke + "66", width: 1, spanGaps: true, points: { show: false } };
        series.push({ ...edge, label: "95% high" }, { ...edge, label: "95% low" });
        bands.push({ series: [data.length - 2, data.length - 1], fill: stroke + "22" });
      }
    });
    const first = chart.xs[0];
    const last = chart.xs[chart.xs.length - 1];
    const whole = chart.xs.every(Number.isInteger) ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8] } : {};
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const plot = new uPlot({
      width: Math.max(260, figure.clientWidth - 24), height: 220, series, bands,
      scales: { x: { time: false, range: first === last ? [first - 1, last + 1] : [first, last] }, y: { range: yRange } },
      axes: [{ ...axis, label: chart.x_label, labelSize: 20, ...whole }, { ...axis, size: 64, values: (_, ticks) => ticks.map((one) => String(Number(one.toPrecision(3)))) }],
      legend: { live: true },
      hooks: { ready: [(ready) => drawMarks(ready, chart)] },
    }, data, place);
    plots.set(place, plot);
    const links = "export" in document.body.dataset ? [] : chart.links;
    plot.over.addEventListener("click", () => {
      const link = links[plot.cursor.idx];
      if (link) location.href = link;
    });
    if (links.length) plot.over.classList.add("clickable");
  }

  // The marks are a list of links below the charts, which keyboards and screen readers use; those in a chart are for
  // the mouse, because a plot is an image, which has no links. Only their heads can be clicked: points are below the lines.
  function drawMarks(plot, chart) {
    if (chart.x_label !== document.getElementById("marks")?.dataset.axis) return;
    const places = new Map();
    for (const item of document.querySelectorAll("#marks [data-x]")) {
      const x = Number(item.dataset.x);
      if (x < plot.scales.x.min || x > plot.scales.x.max || item.dataset.kind === chart.name) continue;
      if (!places.has(x)) places.set(x, []);
      places.get(x).push(item);
    }
    for (const [x, items] of places) {
      const mark = document.createElement("span");
      const target = items[0].querySelector("a");
      mark.className = `mark mark-${items[0].dataset.kind}`;
      mark.title = items.map((item) => (item.querySelector("a") || item).textContent).join("\n");
      mark.style.left = `${plot.valToPos(x, "x") - 5}px`;
      mark.addEventListener("click", (event) => {
        event.stopPropagation();
        if (target) location.href = target.href;
      });
      plot.over.append(mark);
    }
  }

  function drawCharts() {
    for (const place of plots.keys()) if (!place.isConnected) plots.delete(place);
    document.querySelectorAll("[data-chart]").forEach(drawChart);
  }

  // ------------------------------------------------------------ keyboard

  function move(by) {
    const items = [...document.querySelectorAll("[data-item]")];
    if (!items.length) return;
    const now = items.indexOf(document.querySelector("[data-item].current"));
    const next = Math.min(items.length - 1, Math.max(0, now < 0 ? (by > 0 ? 0 : items.length - 1) : now + by));
    items.forEach((one) => one.classList.remove("current"));
    items[next].classList.add("current");
    items[next].scrollIntoView({ block: "nearest" });
    const link = items[next].querySelector("a");
    if (link) link.focus({ preventScroll: true });
  }

  function follow(relation) {
    const link = document.querySelector(`main a[rel=${relation}]`) || document.querySelector(`link[rel=${relation}]`);
    if (link) location.href = link.href;
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const actions = {
      j: () => move(1), k: () => move(-1), n: () => follow("next"), p: () => follow("prev"),
      "/": () => document.getElementById("search")?.focus(),
    };
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  });

  // ------------------------------------------------------------ start

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("ratchet-theme", root.dataset.theme);
    drawCharts();
  });
  let resizing;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(drawCharts, 150);
  });
  document.body.addEventListener("htmx:afterSettle", drawCharts);
  const opened = document.querySelector(location.hash ? `[id="${CSS.escape(location.hash.slice(1))}"]` : "#none");
  if (opened) {
    opened.classList.add("target");
    opened.closest("details")?.setAttribute("open", "");
  }
  drawCharts();
})();
