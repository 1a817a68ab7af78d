{{- define "rs.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "rs.selector" -}}
app.kubernetes.io/name: responses-stack
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "rs.labels" -}}
{{ include "rs.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{- define "rs.isScalable" -}}{{ if eq .Values.preset "vllm" }}true{{ end }}{{- end -}}

{{- define "rs.startupSeconds" -}}
{{- if include "rs.isScalable" . }}{{ .Values.startupSeconds }}{{ else }}{{ max 1800 (int .Values.startupSeconds) }}{{ end -}}
{{- end -}}

{{- /* The run config: that of the preset, what the chart knows of the cluster, and last what `config` says. */ -}}
{{- define "rs.config" -}}
{{- $config := .Files.Get (printf "files/%s.yaml" .Values.preset) | fromYaml -}}
{{- if or (not $config) (hasKey $config "Error") -}}{{ fail (printf "files/%s.yaml is not the run config of distributions/%s: check out the links of this chart." .Values.preset .Values.preset) }}{{- end -}}
{{- $_ := set $config.server "grace_period_s" (int .Values.gracePeriodSeconds) -}}
{{- if include "rs.isScalable" . -}}
{{- $urls := .Values.vllm.urls -}}
{{- if .Values.vllm.enabled -}}
{{- $urls = list -}}
{{- range $number := until (int .Values.vllm.replicas) -}}
{{- $urls = append $urls (printf "http://%s-vllm-%d.%s-vllm:8000/v1" (include "rs.name" $) $number (include "rs.name" $)) -}}
{{- end -}}
{{- else if not $urls -}}{{ fail "vllm.enabled is false: name your servers in vllm.urls." }}{{- end -}}
{{- $_ := set $config.inference "base_url" $urls -}}
{{- $_ := set $config "kv_store" (dict "provider" .Values.store.kind "url" "${env.STORE_URL}") -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy .Values.config) | toYaml -}}
{{- end -}}

{{- define "rs.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "rs.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "rs.storePort" -}}{{ if eq .Values.store.kind "redis" }}6379{{ else }}5432{{ end }}{{- end -}}

{{- define "rs.resources" -}}
{{- if eq .Values.preset "gpt-oss" -}}
requests: {cpu: "4", memory: 16Gi}
limits: {memory: 32Gi, nvidia.com/gpu: "1"}
{{- else if eq .Values.preset "local" -}}
requests: {cpu: "2", memory: 2Gi}
limits: {memory: 4Gi}
{{- else -}}
requests: {cpu: "1", memory: 512Mi}
limits: {memory: 2Gi}
{{- end -}}
{{- end -}}
