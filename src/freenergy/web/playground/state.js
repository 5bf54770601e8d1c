// The settings of the page. They live in the URL's fragment, so that a link opens the same view.
import { byId } from "./words.js";

const NUMBERS = ["candidates", "length", "top_k", "temperature", "seed"];
const RANGES = ["candidates", "length", "top_k", "temperature"];
const HINTS = {
  restricted: "the model with the base as truncated and tempered here: weight exp(−E)",
  model: "the model itself, on what such a base can write: weight P_LM/q · exp(−E)",
};

// Fill the form from the defaults and the fragment, and keep both in step from then on.
export function bindSettings({ defaults, limits, examples, trained_length }) {
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
  apply({ ...defaults, ...fragment() });
  byId("ask").addEventListener("input", (event) => changed(event, defaults));
  addEventListener("hashchange", () => apply({ ...defaults, ...fragment() }));
}

export function settings() {
  const found = { prefix: byId("prefix").value, law: chosenLaw() };
  for (const name of NUMBERS) found[name] = byId(name).valueAsNumber;
  return found;
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
