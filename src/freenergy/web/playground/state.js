// The settings of the page. They live in the URL's fragment, so that a link opens the same view.
import { byId } from "./words.js";

const NUMBERS = ["candidates", "length", "top_k", "temperature", "seed"];
// Where each of these stands among a sampler's settings; what a sampler does not have is switched off.
const PLACES = {
  candidates: ["candidates"],
  top_k: ["truncation.top_k", "top_k"],
  temperature: ["truncation.temperature"],
  law: ["law"],
};
const RANGES = ["candidates", "length", "top_k", "temperature"];
const HINTS = {
  restricted: "the model with the base as truncated and tempered here: weight exp(−E)",
  model: "the model itself, on what such a base can write: weight P_LM/q · exp(−E)",
};
const samplers = new Map(); // the settings of each, by its name

// Fill the form from the defaults and the fragment, and keep both in step from then on.
export function bindSettings({ defaults, limits, examples, trained_length, samplers: listed }) {
  const bounds = {
    candidates: [1, limits.candidates, 1],
    length: [1, limits.length, 1],
    top_k: [0, limits.top_k, 1],
    temperature: [0.01, 5, 0.01],
    seed: [0, limits.seed, 1],
  };
  for (const name of NUMBERS) bound(byId(name), bounds[name]);
  for (const name of RANGES) bound(byId(`${name}-range`), bounds[name]);
  byId("candidates-range").max = Math.min(limits.candidates, 512);
  byId("length-range").max = Math.min(limits.length, 4 * defaults.length);
  byId("top_k-range").max = Math.min(limits.top_k, 200);
  bound(byId("temperature-range"), [0.05, 2, 0.05]);
  if (trained_length !== null) byId("length-hint").textContent = `tokens; the energy reads ${trained_length} at a time`;
  fillExamples(examples);
  for (const { id, settings: names } of listed) samplers.set(id, names);
  byId("sampler").replaceChildren(...listed.map(({ id }) => new Option(id, id)));
  defaults = { ...defaults, sampler: listed[0].id, settings: "" };
  apply({ ...defaults, ...fragment() });
  byId("ask").addEventListener("input", (event) => changed(event, defaults));
  addEventListener("hashchange", () => apply({ ...defaults, ...fragment() }));
}

export function settings() {
  const found = { prefix: byId("prefix").value, law: chosenLaw(), sampler: byId("sampler").value, settings: byId("sampler-settings").value.trim() };
  for (const name of NUMBERS) found[name] = byId(name).valueAsNumber;
  return found;
}

// What the server is asked: without settings that the sampler does not have, and with its own as an object.
export function request() {
  const found = settings();
  for (const name of Object.keys(PLACES)) if (!has(name)) delete found[name];
  found.settings = Object.fromEntries(found.settings.split(/\s+/).filter(Boolean).map(pair));
  return found;
}

function pair(text) {
  const at = text.indexOf("=");
  if (at < 1) throw new Error(`${text} is not a setting: write key=value`);
  return [text.slice(0, at), text.slice(at + 1)];
}

// A model without an energy is only its base: there "candidates" are the texts that it writes.
function has(name) {
  const names = samplers.get(byId("sampler").value) ?? [];
  return PLACES[name].some((place) => names.includes(place)) || (samplers.size === 1 && name === "candidates");
}

function switchOff() {
  for (const name of Object.keys(PLACES)) {
    for (const input of document.querySelectorAll(`#${name}, #${name}-range, input[name="${name}"]`)) input.disabled = !has(name);
  }
  byId("sampler-hint").textContent = `has ${samplers.get(byId("sampler").value).join(", ") || "no settings"}`;
}

function bound(input, [min, max, step]) {
  Object.assign(input, { min, max, step });
}

function apply(found) {
  byId("prefix").value = found.prefix ?? "";
  for (const name of NUMBERS) byId(name).value = found[name];
  for (const name of RANGES) byId(`${name}-range`).value = found[name];
  const radio = document.querySelector(`input[name="law"][value="${found.law}"]`);
  radio.checked = true;
  byId("law-hint").textContent = HINTS[found.law];
  byId("sampler").value = found.sampler;
  byId("sampler-settings").value = found.settings;
  switchOff();
}

function chosenLaw() {
  return document.querySelector('input[name="law"]:checked').value;
}

function changed(event, defaults) {
  const { id, value } = event.target;
  if (id.endsWith("-range")) byId(id.slice(0, -"-range".length)).value = value;
  if (RANGES.includes(id)) byId(`${id}-range`).value = value;
  if (id === "example" && value !== "") byId("prefix").value = byId("example").selectedOptions[0].whole;
  if (id === "prefix") byId("example").selectedIndex = 0;
  byId("law-hint").textContent = HINTS[chosenLaw()];
  switchOff();
  const told = new URLSearchParams();
  for (const [name, now] of Object.entries(settings())) {
    if (!Number.isNaN(now) && now !== (defaults[name] ?? "")) told.set(name, now);
  }
  history.replaceState(null, "", told.size ? `#${told}` : location.pathname);
}

// What the fragment says; what is not a number, a law or a sampler is left out.
function fragment() {
  const found = {};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (name === "prefix") found.prefix = value;
    if (name === "settings") found.settings = value;
    if (name === "sampler" && samplers.has(value)) found.sampler = value;
    if (name === "law" && value in HINTS) found.law = value;
    if (NUMBERS.includes(name) && value.trim() && Number.isFinite(Number(value))) found[name] = Number(value);
  }
  return found;
}

function fillExamples(examples) {
  const choices = examples.map((prefix) => Object.assign(new Option(shortened(prefix)), { whole: prefix }));
  byId("example").replaceChildren(new Option("an example …", ""), ...choices);
  byId("examples").hidden = examples.length === 0;
}

function shortened(prefix) {
  const characters = [...prefix.trim().replace(/\s+/g, " ")];
  return characters.length > 70 ? `${characters.slice(0, 69).join("")}…` : characters.join("");
}
