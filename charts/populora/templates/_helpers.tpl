{{/* Name of the objects of this release, at most 52 characters so that suffixes fit. */}}
{{- define "populora.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains "populora" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-populora" (.Release.Name | trunc 43 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the controller's pods; they never change. */}}
{{- define "populora.selectorLabels" -}}
app.kubernetes.io/name: populora
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: controller
{{- end -}}

{{/* Labels of every object. */}}
{{- define "populora.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "populora.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "populora.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "populora.fullname" .) -}}
{{- else -}}
{{- /* Not `default`: the controller's rights would go to every pod that names no account. */ -}}
{{- required "serviceAccount.name: the name of an existing ServiceAccount, as serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "populora.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "populora.leaseNamespace" -}}
{{- .Values.controller.leaseNamespace | default .Release.Namespace -}}
{{- end -}}

{{/* Security of containers: what the Pod Security profile `restricted` asks for, and a read-only root. */}}
{{- define "populora.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "populora.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.securityContext.runAsUser }}
runAsUser: {{ . | int64 }}
{{- end }}
{{- with .Values.securityContext.runAsGroup }}
runAsGroup: {{ . | int64 }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Arguments of the controller's container. */}}
{{- define "populora.args" -}}
{{- $controller := .Values.controller -}}
{{- $workloads := .Values.workloads -}}
- controller
{{- range $controller.namespaces }}
- --namespace={{ . }}
{{- end }}
- --lease-namespace={{ include "populora.leaseNamespace" . }}
- --lease-name={{ $controller.leaseName }}
- --lease-seconds={{ $controller.leaseSeconds }}
- --metrics-port={{ $controller.metricsPort }}
- --health-port={{ $controller.healthPort }}
{{- with $workloads.trainerImage }}
- --trainer-image={{ . }}
{{- end }}
{{- with $workloads.sandboxImage }}
- --sandbox-image={{ . }}
{{- end }}
{{- with $workloads.sidecarImage }}
- --sidecar-image={{ . }}
{{- end }}
{{- with $workloads.servingImage }}
- --serving-image={{ . }}
{{- end }}
- --image-pull-policy={{ $workloads.imagePullPolicy }}
{{- range $workloads.imagePullSecrets }}
- --image-pull-secret={{ . }}
{{- end }}
- --workers={{ $controller.workers }}
- --resync-seconds={{ $controller.resyncSeconds }}
- --status-poll-seconds={{ $controller.statusPollSeconds }}
- --log-format={{ $controller.logFormat }}
- --log-level={{ $controller.logLevel }}
{{- range $controller.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}
