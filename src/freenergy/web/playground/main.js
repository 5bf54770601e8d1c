// The page: what a button asks of the server, and where the answer is shown.
import { ask, askLines } from "./api.js";
import { axis } from "./axis.js";
import { colouring } from "./colouring.js";
import { savePicture } from "./picture.js";
import { addShares, showCards, showNext, showPicked, showTable, showText, showTrust } from "./results.js";
import { bindSettings, request, settings } from "./state.js";
import { task } from "./task.js";
import { byId } from "./words.js";

// What was written last: a long text has several parts, each chosen among candidates of its own.
let shown = { asked: null, parts: [], at: 0 };
let picked = null;
const marks = axis(byId("axis"), (one) => {
  picked = one;
  showPicked(one, one.number === shown.parts[shown.at]?.step?.chosen);
});
const colours = colouring();

task({ form: "ask", go: "write", stop: "stop", status: "status", error: "error" }, write);
const rise = task({ form: "rise", go: "rise-go", stop: "rise-stop", status: "rise-status", error: "rise-error" }, colour);
task({ form: "next", go: "next-go", stop: "next-stop", status: "next-status", error: "next-error" }, next);
byId("save").addEventListener("click", () => savePicture(marks.svg, "freenergy-candidates.svg"));
byId("picked-colour").addEventListener("click", () => rise(picked));
byId("part").addEventListener("change", () => showPart(byId("part").selectedIndex));
byId("twin").addEventListener("toggle", showTwin);

try {
  const found = await ask("/playground/about");
  document.title = `${found.name} – freenergy playground`;
  byId("name").textContent = found.name;
  bindSettings(found);
  bindNext(found);
  document.body.classList.toggle("base-only", !found.has_energy);
  byId("twin").open = !found.has_energy;
  document.body.dataset.ready = "";
} catch (problem) {
  byId("error").textContent = problem.message;
  byId("error").hidden = false;
}

async function write(say, signal) {
  const asked = settings();
  shown = { asked, parts: [], at: 0 };
  for (const id of ["chosen", "trust", "sides", "picked", "parts"]) byId(id).hidden = true;
  for (const id of ["part", "notes"]) byId(id).replaceChildren();
  marks.clear();
  showTwin();
  const body = request();
  shown.total = body.candidates;
  byId("candidates-section").hidden = !("candidates" in body);
  say("candidates" in body ? `drawing ${asked.candidates} candidates …` : `sampling by ${asked.sampler} …`);
  let isWhole = false;
  for await (const found of askLines("/playground/write", body, signal)) {
    if (found.event === "error") throw new Error(found.message);
    if (found.event === "drawn") say(add(found));
    if (found.event === "added") showText(asked.prefix, found.text);
    if (found.event === "written") {
      isWhole = true;
      finish(found);
    }
  }
  if (!isWhole) throw new Error("the server ended before the text was written: press Write again");
  say("written");
}

function add({ part: number, context, candidates }) {
  if (number === shown.parts.length) {
    shown.parts.push({ context, candidates: [], step: null });
    byId("part").add(new Option(number + 1));
    byId("part").selectedIndex = number;
    byId("parts").hidden = number === 0;
    shown.at = number;
    byId("picked").hidden = true;
    marks.clear();
  }
  const part = shown.parts[number];
  part.candidates.push(...candidates);
  addShares(part.candidates);
  marks.draw(part.candidates);
  showTwin();
  const where = number ? ` of part ${number + 1}` : "";
  const total = Math.max(part.candidates.length, shown.total ?? 0);
  return `${part.candidates.length} of ${total} candidates${where} are here …`;
}

function finish({ text, steps, word, notes, evidence }) {
  showText(shown.asked.prefix, text);
  showTrust({ steps, word, notes, evidence });
  if (!shown.parts.length) return; // a sampler that does not choose among candidates
  steps.forEach((step, k) => (shown.parts[k].step = step));
  showPart(shown.at);
}

function showPart(k) {
  shown.at = k;
  const { candidates, step } = shown.parts[k];
  const chosen = step?.chosen ?? null;
  marks.clear();
  marks.draw(candidates, chosen);
  showTwin();
  if (chosen === null) return;
  marks.pick(chosen);
  const isCut = shown.asked.top_k > 0 || shown.asked.temperature !== 1;
  showCards(candidates, chosen, isCut, (one) => rise(one));
}

// A thousand rows cost time: the table is made when somebody looks.
function showTwin() {
  const part = shown.parts[shown.at];
  if (byId("twin").open) showTable(part?.candidates ?? [], part?.step?.chosen ?? null);
}

// A candidate by its tokens, since text can be cut into tokens in more ways than one; what was typed by its text.
async function colour(say, signal, one = null) {
  if (one) byId("rise-text").value = one.text;
  const of = one ? { context: shown.parts[shown.at].context, tokens: one.tokens } : { prefix: settings().prefix, text: byId("rise-text").value };
  say("reading …");
  const found = await ask("/playground/rising", of, signal);
  colours.draw(found.pieces);
  say("");
  if (one) {
    byId("rising-heading").scrollIntoView();
    colours.focus();
  }
}

function bindNext({ defaults, limits }) {
  Object.assign(byId("next-rows"), { min: 1, max: limits.next_rows, value: defaults.next_rows });
  Object.assign(byId("next-completions"), { min: 2, max: limits.completions, value: defaults.completions });
}

async function next(say, signal) {
  const { prefix, seed } = settings();
  const [top_k, completions] = [byId("next-rows").valueAsNumber, byId("next-completions").valueAsNumber];
  say("drawing completions …");
  showNext(await ask("/playground/next", { prefix, seed, top_k, completions }, signal));
  say("");
}
