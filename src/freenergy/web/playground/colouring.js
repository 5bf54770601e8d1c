// A text by what each token adds to its energy: colour, and a line below that grows with it (solid: rises, dotted: falls).
import { roving } from "./roving.js";
import { byId, element, number, signed, table } from "./words.js";

const THICKEST = 5; // pixels

export function colouring() {
  const holder = byId("coloured");
  let pieces = [];
  const pick = (i) => {
    for (const one of holder.querySelectorAll("[aria-selected='true']")) one.setAttribute("aria-selected", "false");
    byId(`piece-${i}`).setAttribute("aria-selected", "true");
    holder.setAttribute("aria-activedescendant", `piece-${i}`);
    byId("rise-readout").textContent = told(pieces[i]);
  };
  for (const [key, value] of Object.entries({ role: "listbox", tabindex: 0, "aria-label": "The tokens of the text" })) holder.setAttribute(key, value);
  const keys = roving(holder, { size: () => pieces.length, first: () => 0, pick });
  holder.addEventListener("pointerover", (event) => {
    const piece = event.target.closest(".piece");
    if (piece) keys.go(Number(piece.dataset.place));
  });

  return {
    draw(found) {
      pieces = found;
      keys.at(null);
      holder.removeAttribute("aria-activedescendant");
      const most = Math.max(...pieces.map((piece) => Math.abs(piece.rise ?? 0)), 1e-9);
      holder.replaceChildren(...pieces.map((piece, i) => span(piece, i, most)));
      byId("rise-readout").textContent = "Point at a token, or go through them with the arrow keys.";
      byId("legend").replaceChildren(...legend(most));
      const rows = pieces.map((piece) => [shown(piece), number(piece.energy), piece.rise === null ? "–" : signed(piece.rise)]);
      byId("rising-table").replaceChildren(table("Energy up to each token", ["token", "energy up to here", "rise"], rows, { wordsFirst: true }));
      byId("rising").hidden = false;
    },
    focus: () => holder.focus(),
  };
}

function span(piece, i, most) {
  const made = element("span", { name: "piece", text: shown(piece), id: `piece-${i}`, role: "option", "aria-selected": "false", "aria-label": told(piece), "data-place": i });
  if (piece.text === "") made.classList.add("end");
  colour(made, piece.rise ?? 0, most);
  return made;
}

// Through the style object: the policy of the page allows no style in HTML.
function colour(made, rise, most) {
  const much = Math.abs(rise) / most;
  if (much < 0.02) return;
  made.classList.add(rise > 0 ? "rises" : "falls");
  made.style.setProperty("--much", `calc(${much.toFixed(3)} * var(--mix))`);
  made.style.setProperty("--thick", `${Math.max(THICKEST * much, 1).toFixed(1)}px`);
}

function legend(most) {
  return [-1, -0.5, 0.5, 1].map((part) => {
    const made = element("span", { name: "key", text: `${part > 0 ? "rises" : "falls"} by ${number(Math.abs(part * most))}` });
    colour(made, part, 1);
    return made;
  });
}

function shown(piece) {
  return piece.text === "" ? "(end of document)" : piece.text;
}

function told(piece) {
  const rise = piece.rise === null ? "no rise is known" : piece.rise < 0 ? `falls by ${number(-piece.rise)}` : `rises by ${number(piece.rise)}`;
  return `“${shown(piece)}”: ${rise}; energy up to here ${number(piece.energy)}`;
}
