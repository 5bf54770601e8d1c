// Candidates as marks: x is the energy, y the base's log-probability, size and opacity the share of the weight.
import { roving } from "./roving.js";
import { number, percent } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 62, right: 18, top: 18, bottom: 50 };
const NEAR = 28; // pixels from which a pointer finds a mark

export function axis(holder, onPick) {
  const svg = shape("svg", { role: "listbox", tabindex: 0, "aria-label": "Candidates, from low to high energy" });
  const state = { candidates: [], order: [], places: [], chosen: null, picked: null, width: 0, height: 0 };
  holder.replaceChildren(svg);

  const pick = (number) => {
    state.picked = number;
    svg.setAttribute("aria-activedescendant", `mark-${number}`);
    for (const mark of svg.querySelectorAll("[aria-selected='true']")) mark.setAttribute("aria-selected", "false");
    svg.querySelector(`#mark-${number}`)?.setAttribute("aria-selected", "true");
    ring(svg, state);
    onPick(state.candidates[number]);
  };
  const keys = roving(svg, {
    size: () => state.order.length,
    first: () => Math.max(state.order.indexOf(state.chosen), 0),
    pick: (place) => pick(state.order[place]),
  });
  const point = (event) => {
    const number = nearest(svg, state, event);
    if (number === null || number === state.picked) return;
    keys.at(state.order.indexOf(number));
    pick(number);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  new ResizeObserver(() => {
    if (holder.clientWidth !== state.width) redraw(svg, holder, state);
  }).observe(holder);

  return {
    svg,
    clear() {
      Object.assign(state, { candidates: [], order: [], chosen: null, picked: null });
      svg.removeAttribute("aria-activedescendant");
      keys.at(null);
      redraw(svg, holder, state);
    },
    draw(candidates, chosen = null) {
      Object.assign(state, { candidates, chosen });
      state.order = candidates.filter((one) => one.energy !== null && one.log_base !== null).sort((a, b) => a.energy - b.energy).map((one) => one.number);
      keys.at(state.picked === null ? null : state.order.indexOf(state.picked));
      redraw(svg, holder, state);
    },
    pick(number) {
      keys.at(state.order.indexOf(number));
      pick(number);
    },
  };
}

function redraw(svg, holder, state) {
  const width = Math.max(holder.clientWidth, 240);
  const height = Math.round(Math.min(Math.max(0.5 * width, 260), 430));
  Object.assign(state, { width: holder.clientWidth, height });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const seen = state.order.map((number) => state.candidates[number]);
  if (!seen.length) {
    state.places = [];
    svg.replaceChildren();
    return;
  }
  const x = scale(seen.map((one) => one.energy), MARGIN.left, width - MARGIN.right, width / 90);
  const y = scale(seen.map((one) => one.log_base), height - MARGIN.bottom, MARGIN.top, height / 60);
  const largest = Math.max(...seen.map((one) => one.share));
  state.places = seen.map((one) => ({ number: one.number, x: x.at(one.energy), y: y.at(one.log_base), r: 3.5 + 17 * Math.sqrt(one.share) }));
  const marks = state.places.map((place, i) => mark(place, seen[i], largest, state));
  marks.sort((a, b) => b.getAttribute("r") - a.getAttribute("r")); // the small ones above the large ones
  svg.replaceChildren(...frame(x, y, width, height), ...marks, ...chosenMark(state, width));
  ring(svg, state);
}

function mark(place, one, largest, state) {
  const opacity = largest > 0 ? 0.45 + 0.5 * Math.sqrt(one.share / largest) : 0.5;
  const made = shape("circle", { id: `mark-${one.number}`, class: "mark", cx: place.x, cy: place.y, r: place.r, opacity });
  made.setAttribute("role", "option");
  made.setAttribute("aria-selected", String(one.number === state.picked));
  const words = one.text.length > 120 ? `${one.text.slice(0, 120)}…` : one.text;
  const role = one.number === state.chosen ? ", chosen" : "";
  made.setAttribute("aria-label", `${one.number + 1}${role}: energy ${number(one.energy)}, ${percent(one.share)} of the weight: ${words}`);
  return made;
}

function chosenMark(state, width) {
  const place = state.places.find((one) => one.number === state.chosen);
  if (!place) return [];
  const isRight = place.x > width - 110;
  const at = { class: "chosen-name", x: place.x + (isRight ? -1 : 1) * (place.r + 13), y: place.y + 4, "text-anchor": isRight ? "end" : "start" };
  return [shape("circle", { class: "chosen-ring", cx: place.x, cy: place.y, r: place.r + 3 }), shape("text", at, "chosen")];
}

function ring(svg, state) {
  svg.querySelector(".active-ring")?.remove();
  const place = state.places.find((one) => one.number === state.picked);
  if (place) svg.append(shape("circle", { class: "active-ring", cx: place.x, cy: place.y, r: place.r + 7 }));
}

function nearest(svg, state, event) {
  const box = svg.getBoundingClientRect();
  const zoom = box.width / svg.viewBox.baseVal.width;
  const [x, y] = [(event.clientX - box.left) / zoom, (event.clientY - box.top) / zoom];
  let [found, least] = [null, NEAR];
  for (const place of state.places) {
    const far = Math.max(Math.hypot(place.x - x, place.y - y) - place.r, 0) + place.r / 1000; // of two under it the smaller
    if (far < least) [found, least] = [place.number, far];
  }
  return found;
}

function frame(x, y, width, height) {
  const [right, bottom] = [width - MARGIN.right, height - MARGIN.bottom];
  const made = [shape("title", {}, "Candidates on the energy axis")];
  for (const value of x.ticks) {
    made.push(shape("line", { class: "grid", x1: x.at(value), x2: x.at(value), y1: MARGIN.top, y2: bottom }));
    made.push(shape("text", { class: "tick", x: x.at(value), y: bottom + 17, "text-anchor": "middle" }, x.words(value)));
  }
  for (const value of y.ticks) {
    made.push(shape("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y.at(value), y2: y.at(value) }));
    made.push(shape("text", { class: "tick", x: MARGIN.left - 7, y: y.at(value) + 4, "text-anchor": "end" }, y.words(value)));
  }
  const middle = (MARGIN.top + bottom) / 2;
  made.push(shape("path", { class: "frame", d: `M${MARGIN.left} ${MARGIN.top}V${bottom}H${right}` }));
  made.push(shape("text", { class: "axis-name", x: (MARGIN.left + right) / 2, y: height - 12, "text-anchor": "middle" }, "energy E (low is likely)"));
  made.push(shape("text", { class: "axis-name", transform: `translate(14 ${middle}) rotate(-90)`, "text-anchor": "middle" }, "log P_LM of the base"));
  for (const one of made.slice(1)) one.setAttribute("aria-hidden", "true");
  return made;
}

// From values to pixels, with round numbers for the ticks.
function scale(values, from, to, wanted) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = high > low ? 0.07 * (high - low) : 1;
  const [start, end] = [low - room, high + room];
  const rough = (end - start) / Math.max(wanted, 2);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((times) => times * power >= rough) * power;
  const ticks = [];
  for (let k = Math.ceil(start / step); k * step <= end; k++) ticks.push(k * step);
  const digits = Math.min(Math.max(-Math.floor(Math.log10(step)), 0), 6);
  return { at: (value) => from + ((value - start) / (end - start)) * (to - from), ticks, words: (value) => number(value, digits).replace(/^−(0\.?0*)$/, "$1") };
}

function shape(tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, typeof value === "number" ? +value.toFixed(3) : value);
  if (text) made.textContent = text;
  return made;
}
