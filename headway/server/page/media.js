
// -- pictures and recordings: what the model takes of them is in the figures: `media` in a conversation, `info` else -----

const LARGEST_FILE = 1024 * 1024, LONGEST_SIDE = 2048, MOST_PICTURES = 8, RATE = 16000; // servers bound what a request may take
const attached = []; // what goes with the next message: { type, url } of a picture, { type, url, name, seconds } of a recording
const can = { see: false, hear: false, transcribe: false }; // to hear is to take recordings in a conversation
let most = { pictures: 0, recordings: 0, seconds: 0 };
let recorder = null;

function offer(info, media) {
  most = media || most;
  can.see = most.pictures > 0;
  can.hear = most.recordings > 0;
  can.transcribe = Boolean(info.hearing);
  const hears = can.hear || can.transcribe;
  $("add-picture").hidden = !can.see;
  $("add-sound").hidden = !hears;
  $("record").hidden = !hears || !(navigator.mediaDevices && window.MediaRecorder); // browsers give it to secure pages alone
  document.body.dataset.transcribes = can.transcribe ? "yes" : "no";
  if (!can.transcribe) return;
  $("prompt").placeholder = "Drop, choose or record speech";
  $("welcome").firstElementChild.textContent = "Let the model hear something";
}

function complain(text) {
  $("complaint").textContent = text;
  $("complaint").hidden = !text;
}

const readAs = file => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(new Error(`${file.name} cannot be read`));
  reader.readAsDataURL(file);
});

// A large file is drawn again, smaller: models scale pictures down anyway.
async function pictureOf(file) {
  if (file.size <= LARGEST_FILE && /^image\/(png|jpeg|webp|gif|bmp)$/.test(file.type)) return readAs(file);
  const bitmap = await createImageBitmap(file).catch(() => { throw new Error(`${file.name || "this file"} is no picture that the browser knows`); });
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height)), canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}

const lasting = seconds => `${seconds.toFixed(1)} s`;

function thumbnail(parent, medium, label) {
  if (medium.type === "input_audio") {
    const chip = el(parent, "span", "chip");
    el(chip, "b", "", medium.name);
    el(chip, "span", "", lasting(medium.seconds));
    return;
  }
  const picture = document.createElement("img");
  picture.src = medium.url;
  picture.alt = label;
  parent.append(picture);
}

// Each medium of a message with its name: "Picture 1", "Recording 1", "Picture 2".
function named(media) {
  const seen = {};
  return media.map(medium => {
    seen[medium.type] = (seen[medium.type] || 0) + 1;
    return [medium, `${medium.type === "input_audio" ? "Recording" : "Picture"} ${seen[medium.type]}`];
  });
}

function thumbnails(parent, media) {
  for (const [medium, label] of named(media)) thumbnail(parent, medium, label);
}

function drawAttached() {
  const strip = $("attached");
  strip.replaceChildren();
  strip.hidden = attached.length === 0;
  named(attached).forEach(([medium, label], i) => {
    const box = el(strip, "span", "thumb");
    thumbnail(box, medium, label);
    const drop = el(box, "button", "", "×");
    drop.type = "button";
    drop.setAttribute("aria-label", `Remove ${label.toLowerCase()}`);
    drop.onclick = () => { attached.splice(i, 1); drawAttached(); };
  });
}

// Adds to the next message. A conversation is sent whole each time, so the server's bounds are on all of it.
function attach(medium) {
  const earlier = talk.flatMap(each => typeof each.content === "string" ? [] : each.content);
  const count = of => of.filter(each => each.type === medium.type).length;
  const [what, all] = medium.type === "input_audio" ? ["recordings", most.recordings] : ["pictures", most.pictures];
  if (count(attached) + count(earlier) >= all) throw new Error(`A conversation takes up to ${all} ${what}`);
  if (what === "pictures" && count(attached) >= MOST_PICTURES) throw new Error(`A message takes up to ${MOST_PICTURES} pictures`);
  attached.push(medium);
  drawAttached();
}

function dropAttached() {
  attached.length = 0;
  drawAttached();
  complain("");
}

async function addFiles(files) {
  complain("");
  for (const file of files) {
    try {
      if (file.type.startsWith("image/") && can.see) attach({ type: "image_url", url: await pictureOf(file) });
      else if (/^(audio|video)\//.test(file.type) && (can.hear || can.transcribe)) await hear(await file.arrayBuffer(), file.name);
      else throw new Error(`${file.name || "This file"} is nothing that the model takes`);
    } catch (error) { complain(error.message); }
  }
}

// A medium as the request sends it.
function partOf({ type, url }) {
  if (type === "image_url") return { type, image_url: { url } };
  return { type, input_audio: { data: url.slice(url.indexOf(",") + 1), format: "wav" } };
}

// What a message is, as the request sends it: its text, or parts where media go with it.
function contentOf(text, media) {
  if (!media.length) return text;
  const parts = media.map(partOf);
  if (text) parts.push({ type: "text", text });
  return parts;
}

// Any sound that the browser can play, as a WAV file of one channel: the server needs no decoder for it. Cut behind `longest`.
async function waveOf(buffer, longest = Infinity) {
  const context = new OfflineAudioContext(1, 1, RATE);
  const sound = await context.decodeAudioData(buffer).catch(() => { throw new Error("The browser cannot read this recording"); });
  const samples = new Float32Array(Math.min(sound.length, Math.floor(longest * RATE)));
  for (let i = 0; i < sound.numberOfChannels; i += 1) sound.getChannelData(i).subarray(0, samples.length).forEach((value, at) => { samples[at] += value / sound.numberOfChannels; });
  const bytes = new DataView(new ArrayBuffer(44 + 2 * samples.length)), text = (at, name) => [...name].forEach((c, i) => bytes.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF"); bytes.setUint32(4, 36 + 2 * samples.length, true); text(8, "WAVEfmt "); bytes.setUint32(16, 16, true);
  bytes.setUint16(20, 1, true); bytes.setUint16(22, 1, true); bytes.setUint32(24, RATE, true); bytes.setUint32(28, 2 * RATE, true);
  bytes.setUint16(32, 2, true); bytes.setUint16(34, 16, true); text(36, "data"); bytes.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => bytes.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, value)) * 32767, true));
  return { file: new Blob([bytes], { type: "audio/wav" }), seconds: samples.length / RATE };
}

// A recording becomes a transcript, or goes with the next message. What the visitor records, `own`, ends where the model's ear does.
async function hear(buffer, name, own = false) {
  if (can.transcribe) { await transcribe(buffer, name); return; }
  const wave = await waveOf(buffer, own ? most.seconds : Infinity);
  if (wave.seconds > most.seconds) throw new Error(`${name} lasts ${lasting(wave.seconds)}; the model hears up to ${Math.floor(most.seconds)} s at once`);
  attach({ type: "input_audio", url: await readAs(wave.file), name, seconds: wave.seconds });
}

async function transcribe(buffer, name) {
  if (running) throw new Error("An answer is under way; stop it first");
  const wave = await waveOf(buffer), form = new FormData();
  form.append("file", wave.file, "recording.wav");
  form.append("model", shared.model);
  form.append("stream", "true");
  $("welcome").hidden = true;
  addTurn("user", `${name} · ${lasting(wave.seconds)}`);
  await answer("v1/audio/transcriptions", form, event => event.type === "transcript.text.delta" ? event.delta : "");
}

async function record() {
  if (recorder) { recorder.stop(); return; }
  complain("");
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true }), pieces = [];
    const own = recorder = new MediaRecorder(stream);
    const end = can.transcribe ? 0 : setTimeout(() => own.stop(), most.seconds * 1000);
    recorder.ondataavailable = event => pieces.push(event.data);
    recorder.onstop = async () => {
      clearTimeout(end);
      complain("");
      recorder = null;
      stream.getTracks().forEach(track => track.stop());
      $("record").setAttribute("aria-pressed", "false");
      $("record").textContent = "Record";
      try { await hear(await new Blob(pieces).arrayBuffer(), "Your recording", true); } catch (error) { complain(error.message); }
    };
    recorder.start();
    $("record").setAttribute("aria-pressed", "true");
    $("record").textContent = "End recording";
  } catch (error) { recorder = null; complain(error.name === "NotAllowedError" ? "The browser may not use the microphone" : error.message); }
}

const takesFiles = () => can.see || can.hear || can.transcribe;
$("add-picture").onclick = () => $("picture-file").click();
$("add-sound").onclick = () => $("sound-file").click();
$("record").onclick = record;
for (const id of ["picture-file", "sound-file"]) $(id).addEventListener("change", event => { addFiles([...event.target.files]); event.target.value = ""; });
$("prompt").addEventListener("paste", event => {
  const files = [...event.clipboardData.files];
  if (files.length && takesFiles()) { event.preventDefault(); addFiles(files); }
});
for (const kind of ["dragover", "dragleave", "drop"]) $("chat").addEventListener(kind, event => {
  if (!takesFiles() || ![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  $("form").classList.toggle("target", kind === "dragover");
  if (kind === "drop") addFiles([...event.dataTransfer.files]);
});
