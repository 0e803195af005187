"use strict";
// Draws the run that lies in #run. Every word of it is written as text, never as markup.
(() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  const NS = "http://www.w3.org/2000/svg";
  // The drawings are as wide as their section, so that letters keep their size on a phone and on paper.
  const PAPER = 680;
  const availableWidth = () => Math.max(280, Math.min(1040, (document.querySelector("section").clientWidth || 1080) - 40));
  let WIDTH = availableWidth();
  const FATES = ["saved", "swapped", "recomputed", "kept"];
  const TRACKS = ["forward", "replay", "backward", "stall", "copy out", "copy back"];
  const PAINT = { "forward": "forward", "replay": "replay", "backward": "backward", "stall": "stall", "copy out": "swapped", "copy back": "saved" };
  const PARTS = ["--kept", "--saved", "--backward", "--recomputed", "--swapped", "--s4", "--s5", "--s7", "--forward"];
  const state = { shown: run.steps.map(() => true), zoom: null, timelineZoom: null, step: run.steps.length - 1 };

  const svg = (name, attributes = {}, parent = null, text = null) => {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  };
  const html = (name, parent = null, text = null, classes = "") => {
    const node = document.createElement(name);
    if (text !== null) node.textContent = text;
    if (classes) node.className = classes;
    if (parent) parent.appendChild(node);
    return node;
  };
  const byId = (id) => document.getElementById(id);
  const clear = (node) => { while (node.firstChild) node.removeChild(node.firstChild); return node; };
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0, size = n;
    while (Math.abs(size) >= 1024 && at < units.length - 1) { size /= 1024; at += 1; }
    return at === 0 ? `${n} B` : `${size.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0)} ${units[at]}`;
  };
  const time = (us) => us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(1)} ms` : `${us.toFixed(0)} µs`;
  const colour = (at) => `var(--s${at % 8})`;
  const ticks = (low, high, count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough) || power;
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(at);
    return found;
  };
  const byteTicks = (high) => {
    let step = 2 ** Math.floor(Math.log2(Math.max(high, 1) / 5));
    if (high / step > 8) step *= 2;
    const found = [];
    for (let at = 0; at <= high; at += step) found.push(at);
    return found;
  };

  // ---------------------------------------------------------------- the tip
  const tip = byId("tip");
  const showTip = (event, text) => {
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 8))}px`;
  };
  const hideTip = () => { tip.style.display = "none"; };
  const hover = (node, text) => {
    node.addEventListener("mousemove", (event) => showTip(event, text));
    node.addEventListener("mouseleave", hideTip);
  };

  // ---------------------------------------------------------------- a plot over time, with zoom
  const X0 = 76;
  const frame = (target, height, range, onZoom, label) => {
    const X1 = WIDTH - 14;
    const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "plot", role: "img", "aria-label": label }, clear(target));
    const x = (us) => X0 + (us - range[0]) / (range[1] - range[0] || 1) * (X1 - X0);
    const at = (event) => {
      const box = root.getBoundingClientRect();
      const px = (event.clientX - box.left) / box.width * WIDTH;
      return range[0] + Math.max(0, Math.min(1, (px - X0) / (X1 - X0))) * (range[1] - range[0]);
    };
    for (const tick of ticks(range[0], range[1], Math.max(2, Math.floor(WIDTH / 130)))) {
      svg("line", { x1: x(tick), x2: x(tick), y1: 8, y2: height - 24, stroke: "var(--grid)" }, root);
      const anchor = x(tick) > X1 - 24 ? "end" : "middle";
      svg("text", { x: x(tick), y: height - 8, "text-anchor": anchor }, root, time(tick));
    }
    const clip = svg("clipPath", { id: `clip-${target.id}` }, svg("defs", {}, root));
    svg("rect", { x: X0, y: 0, width: X1 - X0, height }, clip);
    const body = svg("g", { "clip-path": `url(#clip-${target.id})` }, root);
    let from = null, brush = null;
    root.addEventListener("mousedown", (event) => {
      from = at(event);
      brush = svg("rect", { x: x(from), y: 8, width: 0, height: height - 32, fill: "var(--accent)", opacity: 0.18 }, root);
      event.preventDefault();
    });
    root.addEventListener("mousemove", (event) => {
      if (from === null) return;
      const to = at(event);
      brush.setAttribute("x", x(Math.min(from, to)));
      brush.setAttribute("width", Math.abs(x(to) - x(from)));
    });
    const release = (event) => {
      if (from === null) return;
      const to = at(event), low = Math.min(from, to), high = Math.max(from, to);
      from = null;
      brush.remove();
      if (x(high) - x(low) > 6) onZoom([low, high]);
    };
    root.addEventListener("mouseup", release);
    root.addEventListener("mouseleave", (event) => { hideTip(); release(event); });
    root.addEventListener("dblclick", () => onZoom(null));
    root.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const middle = at(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
      onZoom([middle - (middle - range[0]) * factor, middle + (range[1] - middle) * factor]);
    }, { passive: false });
    return { root, body, x, at };
  };
  const lastOf = (step) => Math.max(1, step.memory.times_us.at(-1) || 0, ...step.spans.map((s) => s.end_us));
  const valueAt = (curve, us) => {
    let low = 0, high = curve.times_us.length - 1;
    if (high < 0 || us > curve.times_us[high] || us < curve.times_us[0]) return null;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (curve.times_us[middle] <= us) low = middle; else high = middle - 1;
    }
    return curve.nbytes[low];
  };

  // ---------------------------------------------------------------- memory over one step
  const drawMemory = () => {
    const steps = run.steps.map((step, at) => ({ step, at })).filter(({ step, at }) => state.shown[at] && step.memory.times_us.length);
    const range = state.zoom || [0, Math.max(1, ...steps.map(({ step }) => lastOf(step)))];
    const X1 = WIDTH - 14;
    const height = 320, bottom = height - 24;
    const budget = run.budget_line || 0;
    const top = 1.08 * Math.max(1, budget, ...steps.map(({ step }) => Math.max(...step.memory.nbytes)));
    const y = (n) => bottom - n / top * (bottom - 12);
    const { root, body, x, at } = frame(byId("memory-plot"), height, range, (zoom) => { state.zoom = zoom; drawMemory(); }, "Memory over one step");
    for (const tick of byteTicks(top)) {
      svg("line", { x1: X0, x2: X1, y1: y(tick), y2: y(tick), stroke: "var(--grid)" }, root);
      svg("text", { x: X0 - 8, y: y(tick) + 4, "text-anchor": "end" }, root, bytes(tick));
    }
    root.appendChild(body);
    if (budget) svg("line", { x1: X0, x2: X1, y1: y(budget), y2: y(budget), stroke: "var(--bad)", "stroke-dasharray": "5 4" }, body);
    for (const { step, at: index } of steps) {
      const { times_us: times, nbytes } = step.memory;
      const path = times.map((us, i) => `${i ? "L" : "M"}${x(us).toFixed(1)} ${y(nbytes[i]).toFixed(1)}`).join("");
      svg("path", { d: path, fill: "none", stroke: colour(index), "stroke-width": 1.8, "stroke-linejoin": "round", "data-step": index }, body);
      const peak = nbytes.indexOf(Math.max(...nbytes));
      const dot = svg("circle", { cx: x(times[peak]), cy: y(nbytes[peak]), r: 4.5, fill: colour(index), stroke: "var(--panel)", "stroke-width": 1.5 }, body);
      hover(dot, `${step.name}: peak ${bytes(nbytes[peak])} at ${time(times[peak])}\n${step.peak_where || ""}`);
    }
    // Above the curves, with a rim: on a phone they cross the label.
    if (budget) svg("text", { x: X1 - 4, y: y(budget) - 5, "text-anchor": "end", style: "fill: var(--bad); stroke: var(--panel); stroke-width: 3px; paint-order: stroke" }, body, `budget ${bytes(budget)}`);
    const cross = svg("line", { y1: 8, y2: bottom, stroke: "var(--soft)", "stroke-dasharray": "2 3", visibility: "hidden" }, root);
    root.addEventListener("mousemove", (event) => {
      const us = at(event);
      cross.setAttribute("x1", x(us));
      cross.setAttribute("x2", x(us));
      cross.setAttribute("visibility", "visible");
      if (event.target.tagName === "circle") return;
      const rows = steps.map(({ step }) => [step.name, valueAt(step.memory, us)]).filter(([, n]) => n !== null);
      showTip(event, [time(us), ...rows.map(([name, n]) => `${name}: ${bytes(n)}`)].join("\n"));
    });
    root.addEventListener("mouseleave", () => cross.setAttribute("visibility", "hidden"));
    byId("memory-reset").disabled = state.zoom === null;
  };
  const memoryControls = () => {
    const bar = byId("memory-steps");
    run.steps.forEach((step, at) => {
      const button = html("button", bar);
      const swatch = html("span", button, null, "swatch");
      swatch.style.background = colour(at);
      button.appendChild(document.createTextNode(step.name));
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        state.shown[at] = !state.shown[at];
        button.setAttribute("aria-pressed", String(state.shown[at]));
        drawMemory();
      });
    });
    byId("memory-reset").addEventListener("click", () => { state.zoom = null; drawMemory(); });
  };

  // ---------------------------------------------------------------- stacked bars
  const stacked = (target, rows, label) => {
    const height = 34, left = Math.min(190, Math.round(WIDTH * 0.34)), letters = Math.floor((left - 10) / 7), most = Math.max(1, ...rows.map((row) => row.parts.reduce((sum, part) => sum + part.value, 0)));
    const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${rows.length * height + 4}`, role: "img", "aria-label": label }, clear(target));
    rows.forEach((row, at) => {
      const y = at * height + 4;
      const name = row.name.length > letters ? `${row.name.slice(0, letters - 1)}…` : row.name;
      const text = svg("text", { x: left - 10, y: y + 18, "text-anchor": "end", class: "strong" }, root, name);
      if (name !== row.name) hover(text, row.name);
      let x = left;
      let total = 0;
      for (const part of row.parts.filter((p) => p.value > 0)) {
        const width = part.value / most * (WIDTH - left - 80);
        const rect = svg("rect", { x, y, width: Math.max(0.5, width - 1), height: height - 8, rx: 2, fill: part.colour }, root);
        hover(rect, `${row.name}\n${part.name}: ${bytes(part.value)}${part.reason ? `\n${part.reason}` : ""}`);
        x += width;
        total += part.value;
      }
      svg("text", { x: x + 8, y: y + 18 }, root, bytes(total));
    });
  };
  const legend = (target, items) => {
    clear(target);
    for (const [name, paint] of items) {
      const item = html("span", target);
      html("span", item, null, "swatch").style.background = paint;
      item.appendChild(document.createTextNode(name));
    }
  };
  const drawPeaks = () => {
    const names = [...new Set(run.steps.flatMap((step) => Object.keys(step.peak_parts)))];
    const paint = (name) => `var(${PARTS[names.indexOf(name) % PARTS.length]})`;
    const rows = run.steps.filter((step) => Object.keys(step.peak_parts).length).map((step) => ({
      name: step.name,
      parts: names.map((name) => ({ name, value: step.peak_parts[name] || 0, colour: paint(name), reason: step.peak_where })),
    }));
    stacked(byId("peak-plot"), rows, "What each peak is made of");
    legend(byId("peak-legend"), names.map((name) => [name, paint(name)]));
  };

  // ---------------------------------------------------------------- the timeline
  const lanesOf = (spans) => {
    const ends = [];
    return spans.map((span) => {
      let lane = ends.findIndex((end) => end - span.start_us <= 0.02 * (span.end_us - span.start_us));
      if (lane < 0) lane = ends.length < 3 ? ends.push(0) - 1 : ends.indexOf(Math.min(...ends));
      ends[lane] = Math.max(ends[lane], span.end_us);
      return { span, lane };
    });
  };
  const drawTimeline = () => {
    const step = run.steps[state.step];
    const range = state.timelineZoom || [0, lastOf(step)];
    const present = TRACKS.filter((track) => step.spans.some((span) => span.track === track));
    const laid = present.map((track) => ({ track, rows: lanesOf(step.spans.filter((span) => span.track === track)) }));
    let y = 12;
    for (const track of laid) {
      track.lanes = 1 + Math.max(0, ...track.rows.map((row) => row.lane));
      track.y = y;
      y += track.lanes * 18 + 12;
    }
    const height = Math.max(70, y + 26);
    const { root, body, x } = frame(byId("timeline-plot"), height, range, (zoom) => { state.timelineZoom = zoom; drawTimeline(); }, "Timeline of work and copies");
    if (!laid.length) svg("text", { x: WIDTH / 2, y: 34, "text-anchor": "middle" }, root, "nothing was recorded for this way");
    root.appendChild(body);
    for (const track of laid) {
      svg("text", { x: X0 - 8, y: track.y + 13, "text-anchor": "end" }, root, track.track);
      for (const { span, lane } of track.rows) {
        if (span.end_us < range[0] || span.start_us > range[1]) continue;
        const width = Math.max(0.8, x(span.end_us) - x(span.start_us) - 0.4);
        const rect = svg("rect", { x: x(span.start_us), y: track.y + lane * 18, width, height: 15, rx: 2, fill: `var(--${PAINT[track.track]})` }, body);
        const size = span.nbytes ? `\n${bytes(span.nbytes)}, ${bytes(span.nbytes / Math.max(1e-9, (span.end_us - span.start_us) / 1e6))}/s` : "";
        hover(rect, `${track.track}${span.name ? ` ${span.name}` : ""}\n${time(span.start_us)} + ${time(span.end_us - span.start_us)}${size}`);
        if (width > 7 * span.name.length + 8 && span.name) {
          const text = svg("text", { x: x(span.start_us) + 5, y: track.y + lane * 18 + 12, style: "fill: #fff; pointer-events: none" }, body, span.name);
          text.style.fontSize = "11px";
        }
      }
    }
    byId("timeline-reset").disabled = state.timelineZoom === null;
    drawFates();
  };
  const timelineControls = () => {
    const bar = byId("timeline-steps");
    const buttons = run.steps.map((step, at) => {
      const button = html("button", bar, step.name);
      button.addEventListener("click", () => {
        state.step = at;
        state.timelineZoom = null;
        buttons.forEach((other, i) => other.setAttribute("aria-pressed", String(i === at)));
        drawTimeline();
      });
      button.setAttribute("aria-pressed", String(at === state.step));
      return button;
    });
    byId("timeline-reset").addEventListener("click", () => { state.timelineZoom = null; drawTimeline(); });
  };

  // ---------------------------------------------------------------- what became of values
  const drawFates = () => {
    const rows = run.steps.filter((step) => step.fates.length).map((step) => ({
      name: step.name,
      parts: step.fates.map((fate) => ({ name: fate.fate, value: fate.nbytes, colour: `var(--${fate.fate})`, reason: fate.reason.replaceAll("_", " ") })),
    }));
    stacked(byId("fate-plot"), rows, "What became of saved values");
    legend(byId("fate-legend"), FATES.map((fate) => [fate, `var(--${fate})`]));
    byId("fate-none").hidden = rows.length > 0;
  };
  const drawOps = () => {
    const step = [...run.steps].reverse().find((candidate) => candidate.ops.length);
    byId("ops").hidden = !step;
    if (!step) return;
    byId("ops-step").textContent = step.name;
    stacked(byId("ops-plot"), step.ops.slice(0, 24).map((op) => ({
      name: `${op.op} × ${op.count}`,
      parts: FATES.map((fate) => ({ name: fate, value: op[`${fate}_bytes`] || 0, colour: `var(--${fate})`, reason: op.reason })),
    })), "Bytes by kind of op");
  };

  // ---------------------------------------------------------------- light and dark
  const theme = (name) => {
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
  };
  byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

  const drawAll = (width) => {
    WIDTH = width;
    drawMemory();
    drawPeaks();
    drawTimeline();
    drawOps();
  };
  memoryControls();
  timelineControls();
  drawAll(availableWidth());
  addEventListener("resize", () => { if (availableWidth() !== WIDTH) drawAll(availableWidth()); });
  addEventListener("beforeprint", () => drawAll(PAPER));
  addEventListener("afterprint", () => drawAll(availableWidth()));
  document.documentElement.dataset.ready = "yes";
})();
