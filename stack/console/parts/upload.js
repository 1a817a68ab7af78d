// Upload of files with progress, one after the other; a failed one stays with its reason until it is dismissed.

import { upload } from "../api.js";
import { html, useRef, useState } from "../vendor/preact.js";
import { Icon } from "./icons.js";

/** Uploads in progress: {name, share, error}; `start` sends files to `path` with the form's other `fields`. */
function useUploads(path, fields, onDone) {
  const [uploads, setUploads] = useState([]);
  const change = (entry, values) => {
    Object.assign(entry, values);
    setUploads((all) => [...all]);
  };
  const drop = (entry) => setUploads((all) => all.filter((other) => other !== entry));
  const start = async (files) => {
    const entries = [...files].map((file) => ({ file, name: file.name, share: 0, error: null }));
    setUploads((all) => [...all, ...entries]);
    for (const entry of entries) {
      const form = new FormData();
      for (const [name, value] of Object.entries(fields)) form.set(name, value);
      form.set("file", entry.file);
      try {
        await onDone(await upload(path, form, (share) => change(entry, { share })));
        drop(entry);
      } catch (error) {
        change(entry, { error });
      }
    }
  };
  return [uploads, start, drop];
}

export function Uploader({ path = "files", fields = { purpose: "assistants" }, onDone, label = "Upload files" }) {
  const [uploads, start, drop] = useUploads(path, fields, onDone);
  const [over, setOver] = useState(false);
  const chooser = useRef(null);
  const dropped = (event) => {
    event.preventDefault();
    setOver(false);
    start(event.dataTransfer.files);
  };
  const chosen = (event) => {
    start(event.target.files);
    event.target.value = "";
  };
  return html`<div class="drop ${over ? "over" : ""}" onDragOver=${(event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)} onDrop=${dropped}>
    <input ref=${chooser} type="file" multiple hidden aria-hidden="true" tabindex="-1" onChange=${chosen} />
    <div class="row"><button class="primary" onClick=${() => chooser.current.click()}>${label}</button> <span class="quiet">or drop them here</span></div>
    ${uploads.map(
      (entry) => html`<div key=${entry.name} class="row upload">
        <span class="clip">${entry.name}</span>
        ${entry.error
          ? html`<span class="bad" role="alert">${entry.error.message}</span>
              <button type="button" class="plain" aria-label="Dismiss" onClick=${() => drop(entry)}><${Icon} name="close" /></button>`
          : html`<progress max="1" value=${entry.share} aria-label="Upload of ${entry.name}"></progress>`}
      </div>`,
    )}
  </div>`;
}
