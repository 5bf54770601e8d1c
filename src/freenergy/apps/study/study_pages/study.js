"use strict";
// The invitation stands after the # of the link, which browsers do not send: it reaches no log of a server or proxy.

const enter = document.getElementById("enter");
const rate = document.getElementById("rate");

function useLink() {
  const token = decodeURIComponent(location.hash.slice(1));
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  document.getElementById("token").value = token;
  enter.requestSubmit();
}

function setUpRating() {
  const comparisons = [...rate.querySelectorAll(".comparison")];
  const button = rate.querySelector("button");
  const status = document.getElementById("status");
  const isOpen = (comparison) => !comparison.querySelector("input:checked");

  function tell() {
    const chosen = comparisons.filter((comparison) => !isOpen(comparison)).length;
    status.textContent = `${chosen} of ${comparisons.length} chosen`;
  }

  // 1 and 2 choose in the box that has the focus, else in the first that is open; then the next open box gets it
  function choose(number) {
    const here = document.activeElement.closest(".comparison");
    const comparison = here || comparisons.find(isOpen);
    if (!comparison) return;
    comparison.querySelector(`input[value="${number}"]`).checked = true;
    tell();
    const next = comparisons.find(isOpen);
    (next ? next.querySelector("input") : button).focus({ preventScroll: true });
    (next || button).scrollIntoView({ block: "nearest" });
  }

  rate.addEventListener("change", tell);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
    if (event.key === "1" || event.key === "2") {
      event.preventDefault();
      choose(event.key);
    }
  });
  rate.addEventListener("submit", () => { button.disabled = true; });
  window.addEventListener("pageshow", () => { button.disabled = false; tell(); });
}

if (enter) {
  window.addEventListener("hashchange", useLink);
  useLink();
}
if (rate) setUpRating();
