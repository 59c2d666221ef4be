// Live figures: one small request a second while the page is visible, none otherwise. What is kept lives here only.
const KEPT = 120, FEWEST = 30, PERIOD = 1000, PATIENCE = 10000;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const fixed = (value, digits) => Number.isFinite(value) ? value.toFixed(digits) : "–";
const count = value => !Number.isFinite(value) ? "–" : value >= 1e6 ? fixed(value / 1e6, 2) + "M" : value >= 1e4 ? fixed(value / 1e3, 1) + "k" : fixed(value, value < 10 && value % 1 ? 1 : 0);
const seconds = value => !Number.isFinite(value) ? "–" : value >= 1 ? fixed(value, 2) + " s" : value >= 1e-3 ? fixed(value * 1e3, value < 0.01 ? 2 : 1) + " ms" : fixed(value * 1e6, 0) + " µs";
const percent = value => Number.isFinite(value) ? fixed(value * 100, value < 0.1 ? 1 : 0) + " %" : "–";

const CHARTS = [
  { title: "Tokens/s", show: count, series: [["generated", "generated"], ["prompt", "prompt"]] },
  { title: "Requests", show: count, series: [["running", "running"], ["waiting", "waiting"]], whole: true },
  { title: "Texts/s", show: count, series: [["ended", "texts"]], pools: true },
  { title: "Request time", show: seconds, series: [["mean", "whole"], ["p99", "whole99"]], dots: true, pools: true },
  { title: "Time to first token", show: seconds, series: [["mean", "ttft"], ["p99", "ttft99"]], dots: true, pools: false },
  { title: "Between tokens", show: seconds, series: [["mean", "itl"], ["p99", "itl99"]], pools: false },
  { title: "KV cache", show: percent, series: [["in use", "kv"], ["prefix hits", "hits"]], top: 1 },
  { title: "Busy", show: percent, series: [["device", "busy"], ["host", "host"]], top: 1, clock: true },
  { title: "Headway", show: seconds, series: [["mean", "lead"]], clock: true },
  { title: "Rows a step", show: count, series: [["mean", "rows"]] },
  { title: "Tokens a row of drafts brings", show: value => fixed(value, 2), series: [["mean", "run"]], drafts: true },
];
const TILES = [["texts", "texts/s", count, undefined, true], ["prompt", "tokens/s", count, undefined, true], ["whole", "a request", seconds, undefined, true], ["generated", "tokens/s", count, undefined, false], ["ttft", "to first token", seconds, undefined, false], ["itl", "between tokens", seconds, undefined, false], ["busy", "device busy", percent, true], ["kv", "KV cache in use", percent, false]];
// The fourth: true only where the device has a clock, false where it has none. The fifth: true only for models that pool, false for others.
const points = [];
let last = null, timer = 0, asking = null, hover = null;

// -- numbers from two answers of /live/figures -----------------------------------------------------------------------------

const sum = list => list.reduce((a, b) => a + b, 0);
const delta = (now, before) => now[1].map((n, i) => n - (before[1][i] || 0));
function mean(now, before) {
  const n = sum(now[1]) - sum(before[1]);
  return n > 0 ? (now[2] - before[2]) / n : NaN;
}
function quantile(now, before, share) {
  const counts = delta(now, before), target = sum(counts) * share, bounds = now[0];
  let below = 0;
  for (let i = 0; i < counts.length; i += 1) {
    if (counts[i] > 0 && below + counts[i] >= target) {
      const low = i === 0 ? 0 : bounds[i - 1], high = bounds[Math.min(i, bounds.length - 1)];
      return low + (high - low) * (target - below) / counts[i];
    }
    below += counts[i];
  }
  return NaN;
}

function sample(now, before) {
  const e = now.engine, point = { at: now.now, running: e.num_running, waiting: e.num_waiting, kv: e.kv_cache_usage };
  if (!before) return point;
  const b = before.engine, wall = now.now - before.now, r = now.requests, q = before.requests;
  const rate = name => (e[name] - b[name]) / wall, queries = e.prefix_cache_queries - b.prefix_cache_queries;
  const drafts = e.num_drafts - b.num_drafts;
  Object.assign(point, {
    run: drafts > 0 ? 1 + (e.num_accepted_tokens - b.num_accepted_tokens) / drafts : NaN,
    generated: rate("generation_tokens"), prompt: rate("prompt_tokens"),
    ttft: mean(r.first_token, q.first_token), ttft99: quantile(r.first_token, q.first_token, 0.99),
    texts: (sum(Object.values(r.finished)) - sum(Object.values(q.finished))) / wall,
    whole: mean(r.whole, q.whole), whole99: quantile(r.whole, q.whole, 0.99),
    itl: mean(r.next_token, q.next_token), itl99: quantile(r.next_token, q.next_token, 0.99),
    hits: queries > 0 ? (e.prefix_cache_hits - b.prefix_cache_hits) / queries : NaN,
    host: Math.min(rate("schedule_seconds") + rate("launch_seconds") + rate("apply_seconds"), 1),
    busy: e.has_device_clock ? Math.min(rate("device_busy_seconds"), 1) : NaN,
    lead: mean(e.headway_seconds, b.headway_seconds), rows: mean(e.rows_per_step, b.rows_per_step),
  });
  return point;
}

// -- drawing -------------------------------------------------------------------------------------------------------

function surface(canvas) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.font = "11px system-ui, sans-serif";
  return { ctx, width, height };
}

const span = () => Math.max(FEWEST, points.length); // seconds in view: the charts widen until two minutes fill them

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value)), lead = value / power;
  return [1, 1.5, 2, 3, 5, 7.5, 10].find(step => lead <= step + 1e-9) * power;
}

function drawChart(chart) {
  const { ctx, width, height } = surface(chart.canvas), base = height - 3, rise = height - 18;
  const values = chart.series.flatMap(([, key]) => points.map(point => point[key])).filter(Number.isFinite);
  const most = Math.max(...values, chart.whole ? 1 : 0), top = chart.top || (most > 0 ? nice(most) : 1);
  const x = i => width - 3 - (points.length - 1 - i) * (width - 6) / (span() - 1), y = value => base - Math.min(value / top, 1) * rise;
  ctx.strokeStyle = css("--line");
  ctx.lineWidth = 1;
  for (const part of [0, 0.5, 1]) { ctx.beginPath(); ctx.moveTo(0, Math.round(y(top * part)) + 0.5); ctx.lineTo(width, Math.round(y(top * part)) + 0.5); ctx.stroke(); }
  ctx.fillStyle = css("--faint");
  ctx.fillText(values.length ? chart.show(top) : "nothing measured yet", 2, 10);
  chart.series.forEach(([, key], number) => {
    const colour = css(`--c${number + 1}`);
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = 1.6;
    ctx.lineJoin = "round";
    for (const run of runs(key)) {
      ctx.beginPath();
      run.forEach(i => ctx.lineTo(x(i), y(points[i][key])));
      ctx.stroke();
      if (run.length === 1 || chart.dots) run.forEach(i => { ctx.beginPath(); ctx.arc(x(i), y(points[i][key]), 2, 0, 7); ctx.fill(); });
      if (number === 0 && run.length > 1) {
        ctx.globalAlpha = 0.12;
        ctx.beginPath();
        ctx.moveTo(x(run[0]), base);
        run.forEach(i => ctx.lineTo(x(i), y(points[i][key])));
        ctx.lineTo(x(run[run.length - 1]), base);
        ctx.fill();
        ctx.globalAlpha = 1;
      }
    }
  });
  const shown = hover === null ? points.length - 1 : Math.max(0, points.length - 1 - hover);
  if (hover !== null) { ctx.fillStyle = css("--faint"); ctx.fillRect(Math.round(x(shown)), 12, 1, height); }
  chart.series.forEach(([, key], i) => { chart.values[i].textContent = chart.show((points[shown] || {})[key]); });
}

function runs(key) {
  const found = [];
  let open = null;
  points.forEach((point, i) => {
    if (!Number.isFinite(point[key])) open = null;
    else if (open) open.push(i);
    else found.push(open = [i]);
  });
  return found;
}

const STEP = ["step", "rows", "tokens", "replayed", "begun", "schedule", "launch", "submitted", "waitAt", "wait", "apply", "lead", "idle", "busy"];
let boxes = [];
function drawSteps() {
  const canvas = $("timeline"), { ctx, width, height } = surface(canvas), left = 52;
  const steps = shared.steps ? shared.steps.slice(-Number($("zoom").value)) : [];
  boxes = [];
  ctx.textBaseline = "middle";
  ctx.fillStyle = css("--soft");
  ctx.fillText("host", 4, 44);
  const clocked = document.body.dataset.clock === "yes";
  if (clocked) ctx.fillText("device", 4, 92);
  if (!steps.length) return;
  const zero = steps[0].begun, begin = step => (step.begun - zero) * 1e6;
  const ends = step => Math.max(begin(step) + step.waitAt + step.wait + step.apply, step.busy === null ? 0 : begin(step) + step.submitted + step.lead + step.busy);
  const until = Math.max(...steps.map(ends), 1), x = time => left + time / until * (width - left - 4);
  const tick = nice(until / 5);
  for (let t = 0; t <= until; t += tick) {
    ctx.fillStyle = css("--line");
    ctx.fillRect(Math.round(x(t)), 16, 1, height - 20);
    ctx.fillStyle = css("--faint");
    const label = t === 0 ? "0" : seconds(t * 1e-6);
    if (x(t) + 6 + ctx.measureText(label).width < width) ctx.fillText(label, x(t) + 3, 8);
  }
  const box = (step, kind, from, span, top, tall, text) => {
    if (!(span > 0)) return;
    const wide = Math.max(x(from + span) - x(from), 0.75);
    ctx.fillStyle = css(`--${kind}`);
    ctx.fillRect(x(from), top, wide, tall);
    boxes.push({ from: x(from), to: x(from) + Math.max(wide, 3), top, tall, text: `${text} ${seconds(span * 1e-6)}\nstep ${step.step}: ${step.rows} rows, ${step.tokens} tokens, ${step.replayed ? "graph" : "eager"}` });
  };
  for (const step of steps) {
    const at = begin(step), waited = at + step.waitAt + step.wait;
    box(step, "schedule", at, step.schedule, 26, 36, "schedule");
    box(step, "launch", at + step.schedule, step.launch, 26, 36, "launch");
    box(step, "wait", at + step.waitAt, step.wait, 34, 20, "wait for the result");
    box(step, "apply", waited, step.apply, 26, 36, "apply");
    if (step.busy === null) continue;
    const start = at + step.submitted + step.lead;
    box(step, "idle", start - step.idle, step.idle, 82, 20, "device idle");
    box(step, "device", start, step.busy, 74, 36, "device works");
    ctx.fillStyle = css("--paper");
    ctx.fillRect(x(start), 74, 1, 36);
    const label = String(step.rows);
    if (x(start + step.busy) - x(start) > ctx.measureText(label).width + 8) ctx.fillText(label, x(start) + 4, 92);
  }
}

function noteSteps() {
  const steps = shared.steps || [], e = last.engine, replayed = e.num_steps ? e.num_graph_steps / e.num_steps : 0;
  if (!steps.length) return "No step yet.";
  if (!e.has_device_clock) return `This ${last.info.device.toUpperCase()} computes inside the launch: there is nothing to run ahead of, and no device time to show.`;
  const waits = Object.entries(e.waits).filter(([, n]) => n > 0).map(([reason, n]) => `${count(n)} ${reason.replaceAll("_", " ")}`).join(", ") || "none";
  return `Run-ahead depth ${e.run_ahead}. ${percent(replayed)} of ${count(e.num_steps)} steps as a graph. ${count(e.num_dry_steps)} found the device idle. Host waits: ${waits}.`;
}

function draw() {
  for (const chart of CHARTS) drawChart(chart);
  drawSteps();
}

// -- polling -------------------------------------------------------------------------------------------------------

function status(kind, text) {
  $("state").className = "state " + kind;
  $("state").lastElementChild.textContent = text;
}

function take(now) {
  const info = now.info, e = now.engine;
  shared.model = now.model;
  offer(info, now.media);
  $("model").textContent = now.model;
  const pools = info.tasks[0] !== "generate", serves = pools ? info.tasks.join(", ") : `KV ${count(info.num_kv_tokens)} tokens`;
  $("facts").textContent = `${info.architecture} · ${info.dtype} · ${info.device} · context ${count(info.max_model_len)} · ${serves}`;
  if (pools && document.body.dataset.kind !== "pool") { document.body.dataset.kind = "pool"; view("live"); } // nothing to chat with
  document.title = `${now.model} · Headway`;
  if (!e) { last = null; status("down", "the engine does not answer"); return; }
  if (last && e.num_steps < last.engine.num_steps) { last = null; points.length = 0; } // another engine
  if (last && now.now - last.now > KEPT) { last = null; points.length = 0; } // long out of view: what was is no part of the picture
  if (last) for (let missed = Math.round((now.now - last.now) * 1000 / PERIOD); missed > 1; missed -= 1) points.push({}); // a point is a second
  points.push(sample(now, last));
  points.splice(0, points.length - KEPT);
  document.body.dataset.clock = e.has_device_clock ? "yes" : "no";
  document.body.dataset.drafts = e.num_accepted_tokens_per_pos.length ? "yes" : "no";
  last = now;
  if ($("hold").getAttribute("aria-pressed") === "false") shared.steps = e.recent_steps.map(step => Object.fromEntries(STEP.map((name, i) => [name, step[i]])));
  const open = e.num_running + e.num_waiting;
  status(open ? "busy" : "up", open ? `${open} open request${open === 1 ? "" : "s"}` : "ready");
  $("steps-note").textContent = noteSteps();
  const recent = key => { for (let i = points.length - 1; i >= Math.max(0, points.length - FEWEST); i -= 1) if (Number.isFinite(points[i][key])) return points[i][key]; return NaN; };
  TILES.forEach(([key, , show], i) => { $("tiles").children[i].firstChild.textContent = show(["generated", "kv", "texts", "prompt"].includes(key) ? points[points.length - 1][key] : recent(key)); });
  for (const [field, name] of [["temperature", "temperature"], ["top_p", "top_p"]]) $(field).placeholder = `${info.generation_defaults[name] ?? 1} (model's)`;
  document.documentElement.dataset.samples = String(points.length);
}

async function ask() {
  try {
    const response = await fetch("live/figures", { headers: headers({}), cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (response.status === 401) { status("down", "an API key is needed"); askForKey(); }
    else if (response.ok) { take(await response.json()); draw(); }
    else status("down", `the server says ${response.status}`);
  } catch (error) { status("down", error.name === "TimeoutError" ? "the server answers slowly" : "the server does not answer"); }
}

// Asks now, unless a question is open; the promise of its answer.
function poll() {
  clearTimeout(timer);
  if (document.visibilityState !== "visible") return Promise.resolve();
  asking ??= (shared.authorised ? ask() : Promise.resolve()).then(() => { asking = null; clearTimeout(timer); timer = setTimeout(poll, PERIOD); });
  return asking;
}

// -- building ------------------------------------------------------------------------------------------------------

const either = (value, yes, no) => value === undefined ? "" : value ? " " + yes : " " + no;
const shownFor = (clock, pools) => either(clock, "clocked", "clockless") + either(pools, "pools", "generates");
for (const [, label, , clock, pools] of TILES) { const tile = el($("tiles"), "div", "tile" + shownFor(clock, pools)); el(tile, "b", "", "–"); el(tile, "span", "", label); }
for (const chart of CHARTS) {
  const card = el($("charts"), "div", "card" + shownFor(chart.clock, chart.pools) + (chart.drafts ? " drafted" : "")), head = el(card, "div", "head");
  el(head, "h3", "", chart.title);
  const now = el(head, "span", "now");
  chart.values = chart.series.map(([label], i) => { el(now, "i", `s${i}`); now.append(label + " "); return el(now, "span", "", "–"); });
  chart.canvas = el(card, "canvas");
  chart.canvas.setAttribute("role", "img");
  chart.canvas.setAttribute("aria-label", chart.title + " over the last two minutes");
  chart.canvas.addEventListener("pointermove", event => { hover = Math.round((1 - event.offsetX / chart.canvas.clientWidth) * (span() - 1)); CHARTS.forEach(drawChart); });
  chart.canvas.addEventListener("pointerleave", () => { hover = null; CHARTS.forEach(drawChart); });
}
$("timeline").addEventListener("pointermove", event => {
  const hit = [...boxes].reverse().find(b => event.offsetX >= b.from && event.offsetX <= b.to && event.offsetY >= b.top && event.offsetY <= b.top + b.tall), tip = $("tip");
  tip.hidden = !hit;
  if (!hit) return;
  tip.textContent = hit.text;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 16 + "px";
});
$("timeline").addEventListener("pointerleave", () => { $("tip").hidden = true; });
$("zoom").addEventListener("input", drawSteps);
$("hold").onclick = () => $("hold").setAttribute("aria-pressed", String($("hold").getAttribute("aria-pressed") === "false"));

function setTheme(theme) { document.documentElement.dataset.theme = theme; draw(); }
const dark = matchMedia("(prefers-color-scheme: dark)");
const preferred = () => localStorage.getItem("headway-theme") || (dark.matches ? "dark" : "light");
dark.addEventListener("change", () => setTheme(preferred()));
$("theme").onclick = () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; localStorage.setItem("headway-theme", next); setTheme(next); };
function view(name) {
  document.body.dataset.view = name;
  for (const each of ["chat", "live"]) $("show-" + each).setAttribute("aria-pressed", String(each === name));
  draw();
}
$("show-chat").onclick = () => view("chat");
$("show-live").onclick = () => view("live");
new ResizeObserver(draw).observe($("live"));
document.addEventListener("visibilitychange", poll);
setTheme(preferred());
view("chat");
poll();
