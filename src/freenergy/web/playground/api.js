// The server: JSON questions, answers whole or line by line, and its errors as the sentences they are.
import { byId } from "./words.js";

const KEY = "freenergy-token";
const GONE = "the server does not answer: see whether `freenergy serve` is still running";
let asking = null; // one dialogue for all who wait for a token

// An answer; without a body the question is a GET.
export async function ask(path, body, signal) {
  return (await send(path, body, signal)).json();
}

// The objects of an answer in lines, each as soon as it is there.
export async function* askLines(path, body, signal) {
  const response = await send(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(() => gone(signal));
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) if (part) yield JSON.parse(part);
  }
}

async function send(path, body, signal) {
  for (;;) {
    const response = await once(path, body, signal);
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await sentence(response));
    const token = await askToken();
    if (token === null) throw new Error(await sentence(response));
    sessionStorage.setItem(KEY, token);
  }
}

function once(path, body, signal) {
  const headers = {};
  const token = sessionStorage.getItem(KEY);
  if (token !== null) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const how = { method: body === undefined ? "GET" : "POST", headers, body: JSON.stringify(body), signal };
  return fetch(path, how).catch(() => gone(signal));
}

function gone(signal) {
  signal?.throwIfAborted();
  throw new Error(GONE);
}

async function sentence(response) {
  const found = await response.json().catch(() => null);
  return found?.error?.message ?? `the server answered ${response.status}: see what it says where it was started`;
}

function askToken() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("ask-token");
    byId("token").value = "";
    dialog.returnValue = "no"; // what Escape leaves
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? byId("token").value : null), { once: true });
    dialog.showModal();
  }).finally(() => (asking = null));
  return asking;
}
