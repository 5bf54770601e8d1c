// One piece of work at a time for a form: its Stop button, what it says meanwhile, and its error in place.
import { byId } from "./words.js";

export function task({ form, go, stop, status, error }, work) {
  let running = null;
  byId(stop).addEventListener("click", () => running?.abort());
  const show = (isRunning) => {
    if (!isRunning && document.activeElement === byId(stop)) byId(go).focus();
    byId(stop).hidden = !isRunning;
    byId(form).setAttribute("aria-busy", String(isRunning));
  };
  const fail = (words) => {
    byId(error).textContent = words;
    byId(error).hidden = words === "";
  };
  const start = async (...given) => {
    running?.abort(); // asking again takes the place of the question before
    const own = new AbortController();
    running = own;
    fail("");
    show(true);
    const say = (words) => {
      if (running === own) byId(status).textContent = words;
    };
    try {
      await work(say, own.signal, ...given);
    } catch (problem) {
      if (running !== own) return;
      say(own.signal.aborted ? "stopped" : "");
      if (!own.signal.aborted) fail(problem.message);
    } finally {
      if (running === own) {
        running = null;
        show(false);
      }
    }
  };
  byId(form).addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  return start;
}
