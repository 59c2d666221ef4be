// Chat with the model over the OpenAI interface. Whatever the model says becomes elements in markdown.js alone.
const $ = id => document.getElementById(id);
const el = (parent, tag, cls, text) => {
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
};
const shared = { model: null, key: sessionStorage.getItem("headway-key") || "", authorised: true };
const headers = extra => shared.key ? { ...extra, Authorization: "Bearer " + shared.key } : { ...extra };

const touch = matchMedia("(pointer: coarse)");
const talk = []; // {role, content}, as the next request will send it; content is text, or parts where there are media
let running = null; // AbortController of the answer under way

function pinned(log) { return log.scrollHeight - log.scrollTop - log.clientHeight < 60; }

// Whoever reads the end goes on seeing it when the composer takes room: settings, pictures, long messages, a phone's keyboard.
let atEnd = true;
$("log").addEventListener("scroll", () => { atEnd = pinned($("log")); });
new ResizeObserver(() => { if (atEnd) $("log").scrollTop = $("log").scrollHeight; }).observe($("log"));

function addTurn(role, text, media = []) {
  const log = $("log"), turn = el(log, "article", "turn " + role);
  turn.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const body = el(turn, "div", role === "user" ? "text" : "text said", media.length ? undefined : text);
  if (media.length) thumbnails(el(body, "div", "shown"), media);
  if (media.length && text) el(body, "span", "", text);
  log.scrollTop = log.scrollHeight;
  return { turn, body };
}

function numberOf(id) {
  const field = $(id);
  return field.value.trim() === "" || !field.checkValidity() ? undefined : Number(field.value);
}

function requestBody() {
  const system = $("system").value.trim();
  const body = {
    model: shared.model || undefined, // not known yet: the server has but one
    messages: system ? [{ role: "system", content: system }, ...talk] : [...talk],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [field, id] of [["temperature", "temperature"], ["top_p", "top_p"], ["max_completion_tokens", "max_tokens"], ["seed", "seed"]]) {
    const value = numberOf(id);
    if (value !== undefined) body[field] = value;
  }
  return body;
}

async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function reasonOf(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return `${response.status} ${response.statusText}: ${text.slice(0, 300)}`; }
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
}

const saidOf = event => (((event.choices || [])[0] || {}).delta || {}).content || "";

// Streams an answer into a turn of the model: of the conversation, or of another form to another address.
async function answer(address = "v1/chat/completions", form = null, pieceOf = saidOf) {
  const controller = new AbortController(), started = performance.now(), log = $("log");
  const shown = addTurn("assistant", "");
  const seen = { text: "", first: null, last: null, chunks: 0, tokens: null, reason: null, problem: null };
  let frame = 0;
  const flush = () => {
    frame = 0;
    const follow = pinned(log);
    drawMarkdown(shown.body, seen.text);
    if (follow) log.scrollTop = log.scrollHeight;
  };
  shown.body.classList.add("writing");
  document.querySelectorAll(".again").forEach(button => button.remove());
  setRunning(controller);
  try {
    // Sent before the first figures came: a moment later the model's name is known, and if not, the server has but one.
    if (shared.model === null) await Promise.race([poll(), new Promise(done => { setTimeout(done, 1000); })]);
    const response = await fetch(address, {
      method: "POST", signal: controller.signal, headers: headers(form ? {} : { "Content-Type": "application/json" }), body: form || JSON.stringify(requestBody()),
    });
    if (response.status === 401) askForKey();
    if (!response.ok) throw new Error(await reasonOf(response));
    for await (const event of serverEvents(response)) {
      if (event.error) throw new Error(event.error.message || "the server reported an error");
      if (event.usage) seen.tokens = event.usage.completion_tokens;
      const choice = (event.choices || [])[0];
      if (choice) seen.reason = choice.finish_reason || seen.reason;
      const piece = pieceOf(event);
      if (!piece) continue;
      seen.last = performance.now();
      seen.first ??= seen.last;
      seen.chunks += 1;
      seen.text += piece;
      frame ||= requestAnimationFrame(flush);
    }
  } catch (error) {
    if (controller.signal.aborted) seen.reason = "stopped";
    else seen.problem = error.message || String(error);
  }
  if (frame) cancelAnimationFrame(frame);
  flush();
  shown.body.classList.remove("writing");
  setRunning(null);
  if (seen.text && !form) talk.push({ role: "assistant", content: seen.text });
  describe(shown.turn, seen, started, form === null);
  if (!touch.matches) $("prompt").focus(); // on a phone that would raise the keyboard over the answer
}

function describe(turn, seen, started, mayRepeat) {
  const follow = pinned($("log"));
  if (seen.problem) el(turn, "div", "problem", seen.problem).setAttribute("role", "alert");
  const about = el(turn, "div", "about"), tokens = seen.tokens ?? seen.chunks, parts = [];
  if (seen.first !== null) {
    parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    if (tokens > 1 && seen.last > seen.first) parts.push(`${((tokens - 1) / (seen.last - seen.first) * 1000).toFixed(1)} tokens/s`);
    parts.push(`first after ${(seen.first - started).toFixed(0)} ms`);
  }
  if (seen.reason === "length") parts.push("ended at the token limit");
  if (seen.reason === "stopped") parts.push("stopped");
  for (const part of parts) el(about, "span", "", part);
  if (seen.text) {
    const copy = el(about, "button", "", "Copy");
    copy.type = "button";
    copy.onclick = async () => { await navigator.clipboard.writeText(seen.text); copy.textContent = "Copied"; };
  }
  if (!mayRepeat) return;
  const again = el(about, "button", "again", "Again");
  again.type = "button";
  again.onclick = () => {
    if (running || talk.length === 0) return;
    if (talk[talk.length - 1].role === "assistant") talk.pop();
    turn.remove();
    answer();
  };
  if (follow) $("log").scrollTop = $("log").scrollHeight;
}

function send(text) {
  const message = text.trim();
  if ((!message && !attached.length) || running || can.transcribe) return; // a model that transcribes takes recordings alone
  if (recorder) { complain("End the recording first"); return; }
  $("welcome").hidden = true;
  const media = [...attached];
  dropAttached();
  talk.push({ role: "user", content: contentOf(message, media) });
  addTurn("user", message, media);
  $("prompt").value = "";
  grow();
  answer();
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = field.scrollHeight + "px";
}

function showSettings(open) {
  $("settings").hidden = !open;
  $("options").setAttribute("aria-expanded", String(open));
}

function askForKey() {
  shared.authorised = false;
  showSettings(true);
  $("key").focus();
}

$("form").addEventListener("submit", event => { event.preventDefault(); send($("prompt").value); });
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) { event.preventDefault(); send($("prompt").value); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape" && running) running.abort(); });
$("stop").onclick = () => running && running.abort();
$("options").onclick = () => showSettings($("settings").hidden);
$("fresh").onclick = () => {
  if (running) running.abort();
  talk.length = 0;
  dropAttached();
  document.querySelectorAll(".turn").forEach(turn => turn.remove());
  $("welcome").hidden = false;
  $("prompt").focus();
};
document.querySelectorAll(".starters button").forEach(button => { button.onclick = () => send(button.textContent); });
$("key").value = shared.key;
$("key").addEventListener("change", () => {
  shared.key = $("key").value.trim();
  sessionStorage.setItem("headway-key", shared.key);
  shared.authorised = true;
  poll();
});
