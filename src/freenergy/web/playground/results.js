// What a request has written: the text, how far to trust it, and four texts side by side.
import { byId, element, number, percent, table } from "./words.js";

const COLUMNS = ["number", "energy", "log P_LM", "share", "text"];
const CLASSES = { thin: "thin", "one candidate decides": "one" };

// The share of each candidate of the weight so far; a forbidden one has none.
export function addShares(candidates) {
  const known = candidates.filter((one) => one.log_weight !== null).map((one) => one.log_weight);
  const most = Math.max(...known);
  const total = known.reduce((sum, log_weight) => sum + Math.exp(log_weight - most), 0);
  for (const one of candidates) one.share = one.log_weight === null ? 0 : Math.exp(one.log_weight - most) / total;
}

export function showText(prefix, text) {
  byId("chosen-prefix").textContent = prefix;
  byId("chosen-text").textContent = text;
  byId("chosen").hidden = false;
}

// How even the weights are, in a word and in numbers; of several parts the worst.
export function showTrust({ steps, word, notes, evidence: lines }) {
  byId("notes").replaceChildren(...notes.map((note) => element("li", { text: note })));
  byId("trust").hidden = false;
  byId("word").hidden = word === null;
  byId("word").textContent = word ?? "";
  byId("word").className = `word ${CLASSES[word] ?? ""}`;
  byId("evidence").textContent = word === null ? lines.join(" ") : evidence(steps);
}

function evidence(steps) {
  const worst = steps.toSorted((a, b) => a.ess - b.ess)[0];
  const { ess, candidates, largest_share: largest, distinct } = worst;
  const same = distinct < candidates ? ` ${candidates - distinct} are repetitions.` : "";
  const where = steps.length > 1 ? `At worst, in part ${steps.indexOf(worst) + 1}: ` : "";
  return `${where}${number(ess, 1)} of ${candidates} candidates are effective; the heaviest has ${percent(largest)} of the weight.${same}`;
}

export function showPicked(one, isChosen) {
  byId("picked-title").textContent = `Candidate ${one.number + 1}${isChosen ? " (chosen)" : ""}`;
  byId("picked-numbers").textContent = numbers(one);
  byId("picked-text").textContent = one.text;
  byId("picked").hidden = false;
}

export function showCards(candidates, chosen, isCut, onColour) {
  const allowed = candidates.filter((one) => one.energy !== null);
  const by = allowed.toSorted((a, b) => a.energy - b.energy);
  const cards = [
    ["base", isCut ? "Base, cut and tempered" : "Base", "the first that was drawn", candidates[0]],
    ["model", "Model", "chosen by weight", candidates[chosen]],
    ["best", "Best", "lowest energy", by[0]],
    ["worst", "Worst", "highest energy", by[by.length - 1]],
  ];
  byId("cards").replaceChildren(...cards.map(([name, title, why, one]) => card(name, title, why, one, onColour)));
  byId("sides").hidden = false;
}

function card(name, title, why, one, onColour) {
  const button = element("button", { text: "Colour", type: "button", "aria-label": `Colour the text of ${title}` });
  button.addEventListener("click", () => onColour(one));
  return element("article", { name }, [
    element("h3", { text: title }),
    element("p", { name: "numbers", text: `${why}: ${numbers(one)}` }),
    element("p", { name: "written" }, [element("bdi", { text: one.text })]),
    button,
  ]);
}

function numbers(one) {
  return `E ${number(one.energy)}, log P_LM ${number(one.log_base)}, ${percent(one.share)} of the weight`;
}

export function showTable(candidates, chosen) {
  const order = candidates.toSorted((a, b) => (a.energy ?? Infinity) - (b.energy ?? Infinity) || a.number - b.number);
  const rows = order.map((one) => [
    `${one.number + 1}${one.number === chosen ? " (chosen)" : ""}`, number(one.energy), number(one.log_base), percent(one.share), one.text,
  ]);
  const made = table("Candidates, lowest energy first", COLUMNS, rows, { words: [4], main: (r) => order[r].number === chosen });
  byId("candidates-table").replaceChildren(made);
}

export function showNext(found) {
  const strata = found.other ? [...found.rows, { ...found.other, text: "(all others)" }] : found.rows;
  const rows = strata.map((row) => [
    row.text, number(row.base, 4), number(row.joint, 4), found.is_exact ? "exact" : row.standard_error === null ? "unknown" : number(row.standard_error, 4),
    row.joint_rank === null ? "" : String(row.joint_rank), row.ess === null ? "" : number(row.ess, 1),
  ]);
  const columns = ["next token", "base", "model", "± standard error", "rank", "effective"];
  byId("next-table").replaceChildren(table("The next token", columns, rows, { wordsFirst: true }));
  byId("next-note").textContent = found.verdict;
  byId("next-note").hidden = found.verdict === "";
}
