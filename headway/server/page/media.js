
// -- pictures and recordings: what the model takes of them is in the figures' `info` ---------------------------------

const LARGEST_FILE = 1024 * 1024, LONGEST_SIDE = 2048, MOST_PICTURES = 8, RATE = 16000; // servers bound what a request may take
const attached = []; // data URLs of pictures that go with the next message
const can = { see: false, hear: false };
let recorder = null;

function offer(info) {
  can.see = Boolean(info.vision);
  can.hear = Boolean(info.hearing);
  $("add-picture").hidden = !can.see;
  $("add-sound").hidden = !can.hear;
  $("record").hidden = !can.hear || !(navigator.mediaDevices && window.MediaRecorder); // browsers give it to secure pages alone
  document.body.dataset.hears = can.hear ? "yes" : "no";
  if (!can.hear) return;
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

function thumbnails(parent, urls) {
  for (const [i, url] of urls.entries()) {
    const picture = document.createElement("img");
    picture.src = url;
    picture.alt = `Picture ${i + 1}`;
    parent.append(picture);
  }
}

function drawAttached() {
  const strip = $("attached");
  strip.replaceChildren();
  strip.hidden = attached.length === 0;
  attached.forEach((url, i) => {
    const box = el(strip, "span", "thumb");
    thumbnails(box, [url]);
    const drop = el(box, "button", "", "×");
    drop.type = "button";
    drop.setAttribute("aria-label", `Remove picture ${i + 1}`);
    drop.onclick = () => { attached.splice(i, 1); drawAttached(); };
  });
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
      if (file.type.startsWith("image/") && can.see) {
        if (attached.length >= MOST_PICTURES) throw new Error(`A message takes up to ${MOST_PICTURES} pictures`);
        attached.push(await pictureOf(file));
        drawAttached();
      } else if (/^(audio|video)\//.test(file.type) && can.hear) await transcribe(await file.arrayBuffer(), file.name);
      else throw new Error(`${file.name || "This file"} is nothing that the model takes`);
    } catch (error) { complain(error.message); }
  }
}

// What a message with pictures is, as the request sends it.
function contentOf(text) {
  if (!attached.length) return text;
  const parts = attached.map(url => ({ type: "image_url", image_url: { url } }));
  if (text) parts.push({ type: "text", text });
  return parts;
}

// Any sound that the browser can play, as a WAV file of one channel: the server needs no decoder for it.
async function waveOf(buffer) {
  const context = new OfflineAudioContext(1, 1, RATE);
  const sound = await context.decodeAudioData(buffer).catch(() => { throw new Error("The browser cannot read this recording"); });
  const samples = new Float32Array(sound.length);
  for (let i = 0; i < sound.numberOfChannels; i += 1) sound.getChannelData(i).forEach((value, at) => { samples[at] += value / sound.numberOfChannels; });
  const bytes = new DataView(new ArrayBuffer(44 + 2 * samples.length)), text = (at, name) => [...name].forEach((c, i) => bytes.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF"); bytes.setUint32(4, 36 + 2 * samples.length, true); text(8, "WAVEfmt "); bytes.setUint32(16, 16, true);
  bytes.setUint16(20, 1, true); bytes.setUint16(22, 1, true); bytes.setUint32(24, RATE, true); bytes.setUint32(28, 2 * RATE, true);
  bytes.setUint16(32, 2, true); bytes.setUint16(34, 16, true); text(36, "data"); bytes.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => bytes.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, value)) * 32767, true));
  return { file: new Blob([bytes], { type: "audio/wav" }), seconds: sound.duration };
}

async function transcribe(buffer, name) {
  if (running) throw new Error("An answer is under way; stop it first");
  const wave = await waveOf(buffer), form = new FormData();
  form.append("file", wave.file, "recording.wav");
  form.append("model", shared.model);
  form.append("stream", "true");
  $("welcome").hidden = true;
  addTurn("user", `${name} · ${wave.seconds.toFixed(1)} s`);
  await answer("v1/audio/transcriptions", form, event => event.type === "transcript.text.delta" ? event.delta : "");
}

async function record() {
  if (recorder) { recorder.stop(); return; }
  complain("");
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true }), pieces = [];
    recorder = new MediaRecorder(stream);
    recorder.ondataavailable = event => pieces.push(event.data);
    recorder.onstop = async () => {
      recorder = null;
      stream.getTracks().forEach(track => track.stop());
      $("record").setAttribute("aria-pressed", "false");
      $("record").textContent = "Record";
      try { await transcribe(await new Blob(pieces).arrayBuffer(), "Your recording"); } catch (error) { complain(error.message); }
    };
    recorder.start();
    $("record").setAttribute("aria-pressed", "true");
    $("record").textContent = "End recording";
  } catch (error) { recorder = null; complain(error.name === "NotAllowedError" ? "The browser may not use the microphone" : error.message); }
}

$("add-picture").onclick = () => $("picture-file").click();
$("add-sound").onclick = () => $("sound-file").click();
$("record").onclick = record;
for (const id of ["picture-file", "sound-file"]) $(id).addEventListener("change", event => { addFiles([...event.target.files]); event.target.value = ""; });
$("prompt").addEventListener("paste", event => {
  const files = [...event.clipboardData.files];
  if (files.length && (can.see || can.hear)) { event.preventDefault(); addFiles(files); }
});
for (const kind of ["dragover", "dragleave", "drop"]) $("chat").addEventListener(kind, event => {
  if (!(can.see || can.hear) || ![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  $("form").classList.toggle("target", kind === "dragover");
  if (kind === "drop") addFiles([...event.dataTransfer.files]);
});
