"use strict";
// Draws the charts from the data in the page, and makes the gallery, the switches and the copy buttons work. The page of a run that goes
// on reloads itself. Text is set as text: nothing here makes markup.

const SVG = "http://www.w3.org/2000/svg";
const kept = history.state || {}; // by this page before it reloaded itself
if (history.state) history.replaceState(null, "");
const chosen = kept.chosen || new Map(); // what the reader has switched, by key

function make(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "path", "line", "circle", "rect", "text"].includes(tag);
  const element = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));

function show(value, digits) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 10 ** -digits) return value.toExponential(1);
  return value.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

// Round steps of 1, 2 or 5 times a power of ten.
function steps(low, high, most) {
  const rough = Math.max((high - low) / Math.max(1, most), 1e-12), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(Number((index * step).toPrecision(12)));
  return found;
}

const swatch = colour => make("svg", {class: "swatch", width: 12, height: 12, "aria-hidden": "true"}, make("rect", {width: 12, height: 12, rx: 3, class: `fill c${colour}`}));

function drawLines(box) {
  const data = JSON.parse(box.dataset.chart), key = box.dataset.key;
  const state = chosen.get(key) || {view: 0, hidden: new Set(), at: null};
  chosen.set(key, state);
  const xsOf = line => line.xs || data.xs;

  function draw() {
    const view = data.views[Math.min(state.view, data.views.length - 1)];
    const lines = view.lines.filter(line => !state.hidden.has(line.name));
    const drawn = lines.length ? lines : view.lines;
    const width = Math.max(260, box.clientWidth), height = width < 500 ? 220 : 260;
    const xs = drawn.flatMap(xsOf), ys = drawn.flatMap(line => line.ys).filter(value => value !== null);
    let [low, high] = data.y || [Math.min(...ys), Math.max(...ys)];
    if (!data.y && data.zero && low >= 0) low = 0;
    if (data.y && ys.length) {
      const least = Math.min(...ys); // from 0, unless all values lie well above it
      low = least < 0.5 ? Math.min(0, least) : Math.floor(least * 10 - 1e-9) / 10;
    }
    if (!Number.isFinite(low) || !Number.isFinite(high)) [low, high] = [0, 1];
    if (high <= low) high = low + (Math.abs(low) || 1) * 0.1;
    if (!data.y) high += (high - low) * 0.06;
    let first = Math.min(...xs), last = Math.max(...xs);
    if (!(last > first)) { first -= 0.5; last = first + 1; }
    const ticks = steps(low, high, height / 45), labels = ticks.map(value => show(value, data.digits));
    const left = Math.max(52, 12 + 6.6 * Math.max(...labels.map(label => label.length))), right = 14, top = 20, bottom = 26;
    const x = value => left + (value - first) / (last - first) * (width - left - right);
    const y = value => top + (high - value) / (high - low) * (height - top - bottom);
    const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": describe(view, drawn)});
    ticks.forEach((value, index) => {
      svg.append(make("line", {class: "gridline", x1: left, x2: width - right, y1: y(value), y2: y(value)}));
      svg.append(make("text", {x: left - 7, y: y(value) + 4, "text-anchor": "end"}, labels[index]));
    });
    const xLabel = view.x || data.x;
    for (const value of steps(first, last, (width - left) / 70)) {
      if (xLabel === "epoch" && !Number.isInteger(value)) continue;
      svg.append(make("text", {x: x(value), y: height - 8, "text-anchor": "middle"}, show(value, 2)));
    }
    svg.append(make("text", {x: 0, y: height - 8, "text-anchor": "start", class: "x-name"}, xLabel));
    if (xLabel === "epoch") {
      let lastText = -Infinity;
      for (const mark of (data.marks || []).slice().sort((a, b) => a.x - b.x)) {
        svg.append(make("line", {class: `mark ${mark.kind}`, x1: x(mark.x), x2: x(mark.x), y1: top - 6, y2: height - bottom}, make("title", {}, mark.text)));
        if (x(mark.x) - lastText < 62) continue;
        const anchor = x(mark.x) > width - 60 ? "end" : x(mark.x) < left + 40 ? "start" : "middle";
        svg.append(make("text", {class: "mark-text", x: x(mark.x), y: 11, "text-anchor": anchor}, mark.kind === "stopped" ? "stopped" : mark.kind));
        lastText = x(mark.x);
      }
    }
    for (const line of drawn) {
      let path = "", isOpen = false;
      const points = [];
      line.ys.forEach((value, index) => {
        if (value === null) { isOpen = false; return; }
        const place = `${x(xsOf(line)[index]).toFixed(1)} ${y(Math.max(low, Math.min(high, value))).toFixed(1)}`;
        path += `${isOpen ? "L" : "M"}${place}`;
        isOpen = true;
        points.push(place);
      });
      const radius = points.length === 1 ? 5 : line.thin ? 2.4 : 3; // one epoch has no line
      svg.append(make("path", {class: `line c${line.c}${line.thin ? " thin" : ""}`, d: path, "data-name": line.name}));
      if (points.length < 25) {
        for (const place of points) svg.append(make("circle", {class: `point c${line.c}`, cx: place.split(" ")[0], cy: place.split(" ")[1], r: radius}));
      }
    }
    const cross = make("line", {class: "cross", y1: top, y2: height - bottom, visibility: "hidden"});
    const dots = drawn.map(line => make("circle", {class: `point c${line.c}`, r: 4.5, visibility: "hidden"}));
    svg.append(cross, ...dots);
    const tip = make("div", {class: "tip", hidden: true}), spoken = make("p", {class: "unseen", "aria-live": "polite"});
    const places = Array.from(new Set(xs)).sort((a, b) => a - b);

    function read(value, isSpoken) {
      const at = places.reduce((best, place) => Math.abs(place - value) < Math.abs(best - value) ? place : best, places[0]);
      state.at = at;
      const head = xLabel === "epoch" ? `epoch ${show(at, 0)}` : `${show(at, 2)} ${xLabel}`;
      tip.replaceChildren(make("b", {}, head));
      const words = [];
      drawn.forEach((line, index) => {
        const lineXs = xsOf(line);
        let near = -1;
        lineXs.forEach((place, position) => { if (line.ys[position] !== null && (near < 0 || Math.abs(place - at) < Math.abs(lineXs[near] - at))) near = position; });
        const isThere = near >= 0 && (line.xs ? Math.abs(lineXs[near] - at) <= (last - first) / 20 : lineXs[near] === at);
        const value = isThere ? line.ys[near] : null;
        dots[index].setAttribute("visibility", isThere ? "visible" : "hidden");
        if (isThere) { dots[index].setAttribute("cx", x(lineXs[near])); dots[index].setAttribute("cy", y(Math.max(low, Math.min(high, value)))); }
        const words_ = `${line.name} ${show(value, data.digits)}`;
        words.push(words_);
        if (index < 12) tip.append(make("div", {}, swatch(line.c), words_));
      });
      for (const mark of xLabel === "epoch" ? data.marks || [] : []) if (Math.abs(mark.x - at) < 0.6) tip.append(make("div", {}, mark.text));
      tip.hidden = false;
      cross.setAttribute("visibility", "visible");
      cross.setAttribute("x1", x(at)); cross.setAttribute("x2", x(at));
      const room = box.clientWidth, scale = svg.getBoundingClientRect().width / width || 1, middle = x(at) * scale;
      const offset = middle + 14 + tip.offsetWidth > room ? Math.max(0, middle - 14 - tip.offsetWidth) : middle + 14;
      tip.style.transform = `translate(${offset}px, ${top}px)`;
      if (isSpoken) spoken.textContent = `${head}: ${words.join(", ")}`;
    }
    function leave() {
      tip.hidden = true;
      [cross, ...dots].forEach(part => part.setAttribute("visibility", "hidden"));
    }
    svg.addEventListener("pointermove", event => {
      const frame = svg.getBoundingClientRect();
      read(first + ((event.clientX - frame.left) * width / frame.width - left) / (width - left - right) * (last - first), false);
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", event => {
      const moves = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity};
      if (!(event.key in moves) || !places.length) return;
      event.preventDefault();
      const now = state.at === null ? places.length - 1 : Math.max(0, places.indexOf(state.at)), move = moves[event.key];
      const next = state.at === null && Number.isFinite(move) ? now : Math.max(0, Math.min(places.length - 1, now + Math.max(-places.length, Math.min(places.length, move))));
      read(places[next], true);
    });
    const hadFocus = box.contains(document.activeElement) ? document.activeElement.dataset.name || document.activeElement.tagName : null;
    box.replaceChildren(svg, tip, spoken, switches(view));
    if (hadFocus) (all("[data-name]", box).find(part => part.dataset.name === hadFocus) || svg).focus();
  }

  function describe(view, lines) {
    const parts = lines.map(line => {
      const values = line.ys.filter(value => value !== null);
      return values.length ? `${line.name} from ${show(values[0], data.digits)} to ${show(values[values.length - 1], data.digits)}` : `${line.name} without values`;
    });
    return `${view.name} over ${view.x || data.x}: ${parts.join("; ")}. Arrow keys read single values.`;
  }

  function switches(view) {
    const row = make("div", {class: "switches"});
    if (data.views.length > 1) {
      const select = make("select", {"aria-label": "Score", "data-name": "view"}, ...data.views.map((each, index) => make("option", {value: index, selected: index === state.view}, each.name)));
      select.addEventListener("change", () => { state.view = Number(select.value); draw(); });
      row.append(select);
    }
    if (view.lines.length > 1) {
      for (const line of view.lines) {
        const button = make("button", {type: "button", class: "switch", "data-name": `switch ${line.name}`, "aria-pressed": String(!state.hidden.has(line.name))}, swatch(line.c), line.name);
        button.addEventListener("click", () => {
          state.hidden.has(line.name) ? state.hidden.delete(line.name) : state.hidden.add(line.name);
          if (view.lines.every(each => state.hidden.has(each.name))) state.hidden.clear();
          draw();
        });
        row.append(button);
      }
      if (view.lines.length > 3) {
        const only = make("button", {type: "button", class: "switch", "data-name": "all"}, state.hidden.size ? "show all" : "hide all but the worst");
        only.addEventListener("click", () => {
          const last = line => line.ys.reduce((found, value) => value === null ? found : value, Infinity);
          const worst = view.lines.slice().sort((a, b) => last(a) - last(b))[0];
          const names = state.hidden.size ? [] : view.lines.filter(line => line !== worst).map(line => line.name);
          state.hidden = new Set(names);
          draw();
        });
        row.append(only);
      }
    }
    return row;
  }
  draw();
  return draw;
}

function drawBars(box) {
  const data = JSON.parse(box.dataset.chart);
  function draw() {
    const width = Math.max(260, box.clientWidth), height = 200, left = 40, right = 12, top = 18, bottom = 40;
    const most = Math.max(1, ...data.counts), bins = data.counts.length;
    const x = value => left + (value - data.from) / (data.to - data.from) * (width - left - right);
    const ticks = steps(0, most, 4).filter(Number.isInteger);
    const y = value => top + (1 - value / most) * (height - top - bottom);
    const words = `${data.x}: ${data.counts.map((count, index) => count ? `${count} from ${(data.from + index * (data.to - data.from) / bins).toFixed(2)}` : "").filter(Boolean).join(", ")}`;
    const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": words});
    for (const value of ticks) {
      svg.append(make("line", {class: "gridline", x1: left, x2: width - right, y1: y(value), y2: y(value)}));
      svg.append(make("text", {x: left - 7, y: y(value) + 4, "text-anchor": "end"}, String(value)));
    }
    const tip = make("div", {class: "tip", hidden: true});
    data.counts.forEach((count, index) => {
      const low = data.from + index * (data.to - data.from) / bins, high = low + (data.to - data.from) / bins;
      const area = make("rect", {x: x(low), width: x(high) - x(low), y: top, height: height - top - bottom, fill: "transparent"});
      const bar = make("rect", {class: "column", x: x(low) + 1.5, width: Math.max(1, x(high) - x(low) - 3), y: y(count), height: Math.max(0, height - bottom - y(count)), rx: 2});
      area.addEventListener("pointerenter", () => {
        bar.classList.add("lit");
        tip.textContent = `${count} ${data.unit}${count === 1 ? "" : "s"} with IoU ${low.toFixed(2)} – ${high.toFixed(2)}`;
        tip.hidden = false;
        tip.style.transform = `translate(${Math.max(0, Math.min(box.clientWidth - tip.offsetWidth, x(low) - tip.offsetWidth / 2))}px, 0)`;
      });
      area.addEventListener("pointerleave", () => { bar.classList.remove("lit"); tip.hidden = true; });
      svg.append(bar, area);
    });
    for (const value of steps(data.from, data.to, width < 500 ? 5 : 10)) svg.append(make("text", {x: x(value), y: height - bottom + 16, "text-anchor": "middle"}, show(value, 2)));
    svg.append(make("text", {x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle"}, data.x));
    for (const mark of data.marks || []) {
      svg.append(make("line", {class: "mark best", x1: x(mark.x), x2: x(mark.x), y1: top - 4, y2: height - bottom}));
      svg.append(make("text", {class: "mark-text", x: x(mark.x), y: 11, "text-anchor": x(mark.x) > width - 70 ? "end" : "middle"}, mark.text));
    }
    box.replaceChildren(svg, tip);
  }
  draw();
  return draw;
}

const redraws = all(".chart").map(box => box.dataset.kind === "bars" ? drawBars(box) : drawLines(box));
let resizing = null, widthBefore = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === widthBefore) return;
  widthBefore = window.innerWidth;
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => redraws.forEach(redraw => redraw()));
});

function setUpMatrix() {
  for (const select of all("#matrix-show")) {
    const table = document.getElementById("matrix");
    const apply = () => { table.dataset.show = select.value; chosen.set("matrix", select.value); };
    select.addEventListener("change", apply);
    if (chosen.has("matrix")) { select.value = chosen.get("matrix"); apply(); }
  }
}

function slideTo(stack, percent) {
  stack.style.setProperty("--at", `${percent}%`);
}

function setUpGallery() {
  const gallery = document.getElementById("gallery"), viewer = document.getElementById("viewer");
  if (!gallery) return;
  const frame = viewer.querySelector("#viewer-frame");
  const cards = all("li", gallery);
  const ratio = card => card.querySelector(".photo").getAttribute("width") / card.querySelector(".photo").getAttribute("height");
  let current = null;
  for (const card of cards) {
    const stack = card.querySelector(".stack"), slide = card.querySelector(".slide");
    card.style.setProperty("--ratio", ratio(card));
    slide.addEventListener("input", () => slideTo(stack, slide.value));
    stack.addEventListener("click", event => { if (event.target !== slide) open(card); });
    card.querySelector(".enlarge").addEventListener("click", () => open(card));
  }

  const shown = () => all("li", gallery).filter(card => !card.hidden);
  function open(card) {
    current = card;
    const stack = card.querySelector(".stack").cloneNode(true), slide = stack.querySelector(".slide");
    slide.value = card.querySelector(".slide").value;
    frame.replaceChildren(stack);
    frame.dataset.view = gallery.dataset.view;
    frame.style.setProperty("--ratio", ratio(card));
    slide.addEventListener("input", () => slideTo(stack, slide.value));
    viewer.querySelector("#viewer-text").textContent = card.dataset.text;
    if (!viewer.open) viewer.showModal();
  }
  function move(number) {
    const list = shown();
    open(list[(list.indexOf(current) + number + list.length) % list.length]);
  }
  viewer.querySelector("#viewer-before").addEventListener("click", () => move(-1));
  viewer.querySelector("#viewer-after").addEventListener("click", () => move(1));
  viewer.querySelector("#viewer-close").addEventListener("click", () => viewer.close());
  viewer.addEventListener("close", () => { frame.replaceChildren(); if (current) current.querySelector(".enlarge").focus(); });
  viewer.addEventListener("keydown", event => {
    if (event.target.matches(".slide") || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    move(event.key === "ArrowLeft" ? -1 : 1);
  });

  function choose(name, apply) {
    for (const input of all(`[name="${name}"]`)) {
      input.addEventListener("change", () => { chosen.set(name, input.value); apply(input.value); });
      if (chosen.get(name) === input.value) { input.checked = true; apply(input.value); }
    }
  }
  choose("gallery-view", view => { gallery.dataset.view = view; });
  choose("gallery-group", group => {
    for (const card of cards) card.hidden = group !== "all" && card.dataset.group !== group;
  });
  const sort = document.getElementById("gallery-sort");
  const orders = {
    worst: (a, b) => a.iou - b.iou, best: (a, b) => b.iou - a.iou, wrong: (a, b) => b.wrong - a.wrong,
    object: (a, b) => b.object - a.object, name: (a, b) => a.name.localeCompare(b.name),
  };
  const apply = () => {
    chosen.set("sort", sort.value);
    const facts = card => ({iou: Number(card.dataset.iou), wrong: Number(card.dataset.wrong), object: Number(card.dataset.object), name: card.dataset.name});
    gallery.append(...cards.slice().sort((a, b) => orders[sort.value](facts(a), facts(b)) || a.dataset.index - b.dataset.index));
  };
  sort.addEventListener("change", apply);
  if (chosen.has("sort")) { sort.value = chosen.get("sort"); apply(); }
}

function setUpCopying() {
  if (!navigator.clipboard) return;
  for (const button of all(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Not allowed here";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
}

function setUpDetails() {
  for (const part of all("details[data-key]")) {
    const key = `open ${part.dataset.key}`;
    if (chosen.has(key)) part.open = chosen.get(key);
    part.addEventListener("toggle", () => chosen.set(key, part.open));
  }
}

// The link of the section that is read is marked.
const seen = new Set();
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
  const first = all("main > section").find(part => seen.has(part.id));
  for (const link of all("nav a")) {
    if (first && link.getAttribute("href") === `#${first.id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}, {rootMargin: "-60px 0px -50% 0px"});

setUpDetails();
setUpMatrix();
setUpGallery();
setUpCopying();
all("main > section").forEach(part => observer.observe(part));
if (kept.y) scrollTo({top: kept.y, behavior: "instant"});
if (Date.now() < Number(document.body.dataset.reloadUntil)) {
  setInterval(() => {
    if (document.querySelector("dialog[open]")) return;
    history.replaceState({chosen, y: scrollY}, "");
    location.reload();
  }, 1000 * document.body.dataset.reloadSeconds);
}
